//! How Megatron-LM cuts layers into the chunks of a pipeline: evenly, with another number in the first and the last stage, or as a
//! layout states.

use ithaca_ir::{Diagnostic, Diagnostics};

use super::flags::{Flags, refusal};

/// The chunks of a pipeline.
pub(super) struct Cut {
    /// Chunks of a stage.
    pub chunks: u64,
    /// The layers of each chunk in order; `None` where the layers of the model are not known.
    pub layers: Option<Vec<u64>>,
}

/// The most chunks of a layout; longer ones are not unrolled.
const MOST: usize = 1 << 16;

/// Reads the flags that cut layers into `stages`.
pub(super) fn read(flags: &mut Flags, stages: u64) -> Result<Cut, Diagnostics> {
    let layers = flags.number("num-layers");
    let each = flags.number("num-layers-per-virtual-pipeline-stage");
    let chunks = flags.number("num-virtual-stages-per-pipeline-rank");
    let ends = ["decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"]
        .map(|name| (name, flags.number(name)));
    let counted = ["account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"]
        .map(|name| u64::from(flags.flag(name)));
    let layout = flags.word("pipeline-model-parallel-layout");
    if stages == 1 {
        return Ok(Cut { chunks: 1, layers: None });
    }
    if let Some(text) = layout {
        let of_layout = of_layout(&text).and_then(|of_chunk| {
            let n = of_chunk.len() as u64;
            if n.is_multiple_of(stages) {
                Ok(Cut { chunks: n / stages, layers: Some(of_chunk) })
            } else {
                Err(refusal(format!(
                    "`--pipeline-model-parallel-layout` has {n} chunks, which do not divide among {stages} stages"
                )))
            }
        });
        return of_layout.map_err(|refused| vec![refused]);
    }
    let Some(layers) = layers else {
        return Ok(Cut { chunks: chunks.unwrap_or(1), layers: None });
    };
    let refused = |message: String| Err(vec![refusal(message)]);
    // The embedding and the head count as a layer of their stage, if flags say so.
    let all = layers + counted[0] + counted[1];
    let given: u64 = ends.iter().filter_map(|(_, n)| *n).sum();
    let others = stages.saturating_sub(ends.iter().filter(|(_, n)| n.is_some()).count() as u64);
    let rest = all.checked_sub(given);
    let of_others = rest.and_then(|rest| rest.checked_div(others)).unwrap_or(0);
    if rest != Some(of_others * others) {
        return refused(format!(
            "{layers} layers do not divide among {stages} stages as `--num-layers` and the flags of stages say"
        ));
    }
    // Layers of a chunk are stated as those of stages without ends of their own.
    let chunks = chunks.or_else(|| each.map(|each| (of_others / each).max(1))).unwrap_or(1);
    let mut of_stage = vec![of_others; usize::try_from(stages).unwrap_or(0)];
    let last = of_stage.len() - 1;
    for (stage, (_, n)) in [0, last].into_iter().zip(ends) {
        of_stage[stage] = n.unwrap_or(of_stage[stage]);
    }
    if let Some(n) = of_stage.iter().find(|n| !n.is_multiple_of(chunks)) {
        return refused(format!("a stage of {n} layers does not divide into {chunks} chunks"));
    }
    let mut of_chunk: Vec<u64> = (0..chunks).flat_map(|_| of_stage.iter().map(|n| n / chunks)).collect();
    let last = of_chunk.len() - 1;
    for (chunk, counted) in [0, last].into_iter().zip(counted) {
        of_chunk[chunk] = of_chunk[chunk].saturating_sub(counted);
    }
    if of_chunk.contains(&0) {
        return refused("a chunk of the pipeline has no layer, and each has one here".to_owned());
    }
    Ok(Cut { chunks, layers: Some(of_chunk) })
}

/// The decoder layers of each chunk of a layout, as `Et*3|(tt|)*29,tL`: chunks are separated by `|`, and `*N` repeats a letter or
/// a group.
fn of_layout(text: &str) -> Result<Vec<u64>, Diagnostic> {
    let of_flag = |why: &str| refusal(format!("`--pipeline-model-parallel-layout {text}` {why}"));
    let letters = repeated(&text.replace(',', "")).ok_or_else(|| {
        of_flag("is not made of chunks that are separated by `|`, such as `Et*3|(tt|)*29tL`")
    })?;
    if !letters.starts_with('E') || !letters.ends_with('L') {
        return Err(of_flag("does not begin with the embedding, `E`, and end with the loss, `L`"));
    }
    let inner = &letters[1..letters.len() - 1];
    if let Some(other) = inner.chars().find(|c| !matches!(c, 't' | '|')) {
        return Err(of_flag(&format!("has `{other}` inside, which is not understood: `t` is a layer")));
    }
    let chunks: Vec<u64> = inner.split('|').map(|chunk| chunk.len() as u64).collect();
    if chunks.contains(&0) {
        return Err(of_flag("has a chunk without a layer, and each has one here"));
    }
    Ok(chunks)
}

/// The text with repetitions written out.
fn repeated(text: &str) -> Option<String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let (unit, after) = match first {
            '(' => rest[1..].split_once(')')?,
            _ => rest.split_at(first.len_utf8()),
        };
        let times = after.strip_prefix('*').map(|after| {
            let digits = after.chars().take_while(char::is_ascii_digit).count();
            (after[..digits].parse::<usize>(), &after[digits..])
        });
        let (n, after) = match times {
            Some((n, after)) => (n.ok()?, after),
            None if first == '(' => return None,
            None => (1, after),
        };
        // A group has repetitions of letters inside.
        let unit = if first == '(' { repeated(unit)? } else { unit.to_owned() };
        if out.len() + unit.len().saturating_mul(n) > MOST {
            return None;
        }
        out.push_str(&unit.repeat(n));
        rest = after;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(stages: u64, flags: &str) -> Result<(u64, Vec<u64>), String> {
        let words: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        let cut = read(&mut Flags::new(&words, &[]), stages).map_err(|refused| refused[0].message.clone())?;
        Ok((cut.chunks, cut.layers.unwrap_or_default()))
    }

    #[test]
    fn layers_are_cut_as_megatron_does() {
        let is = |stages, flags: &str, chunks, expected: &[u64]| {
            assert_eq!(layers(stages, flags).unwrap(), (chunks, expected.to_vec()), "{flags}");
        };
        is(4, "--num-layers 8", 1, &[2; 4]);
        is(2, "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2", 2, &[2; 4]);
        is(2, "--num-layers 8 --num-virtual-stages-per-pipeline-rank 4", 4, &[1; 8]);
        is(
            4,
            "--num-layers 30 --decoder-first-pipeline-num-layers 7 --decoder-last-pipeline-num-layers 5",
            1,
            &[7, 9, 9, 5],
        );
        is(
            2,
            "--num-layers 10 --decoder-last-pipeline-num-layers 4 --num-virtual-stages-per-pipeline-rank 2",
            2,
            &[3, 2, 3, 2],
        );
        is(
            4,
            "--num-layers 126 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split \
             --num-layers-per-virtual-pipeline-stage 16",
            2,
            &[15, 16, 16, 16, 16, 16, 16, 15],
        );
        is(2, "--pipeline-model-parallel-layout Et*3|(tt|)*2t,L", 2, &[3, 2, 2, 1]);
        is(2, "--pipeline-model-parallel-layout E(t|)*3tL", 2, &[1; 4]);
        is(3, "", 1, &[]);
    }

    #[test]
    fn cuts_that_do_not_divide_are_refused() {
        for (stages, flags, why) in [
            (4, "--num-layers 10", "10 layers do not divide among 4 stages"),
            (2, "--num-layers 6 --num-virtual-stages-per-pipeline-rank 2", "3 layers does not divide into 2"),
            (2, "--pipeline-model-parallel-layout Et|t|tL", "3 chunks"),
            (2, "--pipeline-model-parallel-layout Et|L", "a chunk without a layer"),
            (2, "--pipeline-model-parallel-layout Et|mtL", "`m`"),
            (2, "--pipeline-model-parallel-layout E(t|tL", "is not made of chunks"),
            (2, "--pipeline-model-parallel-layout Et*99999999|tL", "is not made of chunks"),
            (2, "--pipeline-model-parallel-layout tt|tL", "the embedding"),
        ] {
            let refused = layers(stages, flags).unwrap_err();
            assert!(refused.contains(why), "{flags}: {refused}");
        }
    }
}
