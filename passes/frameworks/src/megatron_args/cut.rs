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

/// The most layers and stages that are read, and letters of a layout.
const MOST: usize = 1 << 16;

/// Flags that state the chunks of a stage, of which Megatron-LM takes one.
const OF_CHUNKS: [&str; 3] = [
    "num-layers-per-virtual-pipeline-stage",
    "num-virtual-stages-per-pipeline-rank",
    "pipeline-model-parallel-layout",
];

/// Flags that state the layers of the first and of the last stage.
const ENDS: [&str; 2] = ["decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"];

/// Flags by which the embedding and the loss count as a layer of their stage.
const COUNTED: [&str; 2] = ["account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split"];

/// Reads the flags that cut layers into `stages`.
pub(super) fn read(flags: &mut Flags, stages: u64) -> Result<Cut, Diagnostics> {
    let layers = flags.number("num-layers");
    let each = flags.number(OF_CHUNKS[0]);
    let chunks = flags.number(OF_CHUNKS[1]);
    let layout = flags.word(OF_CHUNKS[2]);
    let ends = ENDS.map(|name| flags.number(name));
    let counted = COUNTED.map(|name| flags.flag(name));
    if stages == 1 {
        return Ok(Cut { chunks: 1, layers: None });
    }
    let given = |names: &[&str], is_given: &[bool]| -> Vec<String> {
        names
            .iter()
            .zip(is_given)
            .filter(|(_, given)| **given)
            .map(|(name, _)| format!("`--{name}`"))
            .collect()
    };
    let of_chunks = given(&OF_CHUNKS, &[each.is_some(), chunks.is_some(), layout.is_some()]);
    let of_ends = given(&ENDS, &ends.map(|n| n.is_some()));
    let excluded = match of_chunks.as_slice() {
        [] | [_] if of_ends.is_empty() => Vec::new(),
        [_] if each.is_some() => [of_chunks, of_ends].concat(),
        [] | [_] if counted.contains(&true) => [of_ends, given(&COUNTED, &counted)].concat(),
        [] | [_] => Vec::new(),
        several => several.to_vec(),
    };
    if !excluded.is_empty() {
        let message = format!("Megatron-LM does not take {} together", excluded.join(" and "));
        return Err(vec![refusal(message)]);
    }
    let cut = match (layout, layers) {
        (Some(text), _) => stated(&text, stages, layers),
        (None, Some(layers)) => even(layers, stages, [each, chunks], ends, counted.map(u64::from)),
        (None, None) if each.is_some() => {
            Err(refusal(format!("`--{}` needs `--num-layers`, which is missing", OF_CHUNKS[0])))
        }
        (None, None) => Ok(Cut { chunks: chunks.unwrap_or(1), layers: None }),
    };
    cut.map_err(|refused| vec![refused])
}

/// The cut of a layout.
fn stated(text: &str, stages: u64, layers: Option<u64>) -> Result<Cut, Diagnostic> {
    let of_chunk = of_layout(text)?;
    let (n, sum) = (of_chunk.len() as u64, of_chunk.iter().sum::<u64>());
    let of_flag = |why: String| Err(refusal(format!("`--{}` has {why}", OF_CHUNKS[2])));
    match layers {
        _ if !n.is_multiple_of(stages) => {
            of_flag(format!("{n} chunks, which do not divide among {stages} stages"))
        }
        Some(layers) if layers != sum => of_flag(format!("{sum} layers, and `--num-layers` is {layers}")),
        Some(_) | None => Ok(Cut { chunks: n / stages, layers: Some(of_chunk) }),
    }
}

/// The cut of `layers` into stages of as many layers, but for the first and the last where flags state theirs.
fn even(
    layers: u64,
    stages: u64,
    [each, chunks]: [Option<u64>; 2],
    ends: [Option<u64>; 2],
    counted: [u64; 2],
) -> Result<Cut, Diagnostic> {
    if layers.max(stages) > MOST as u64 {
        return Err(refusal(format!("{layers} layers in {stages} stages, and at most {MOST} are read")));
    }
    let all = layers + counted[0] + counted[1];
    let given = ends.iter().flatten().fold(0, |sum: u64, n| sum.saturating_add(*n));
    let others = stages.saturating_sub(ends.iter().flatten().count() as u64);
    let rest = all.checked_sub(given);
    let of_others = rest.and_then(|rest| rest.checked_div(others)).unwrap_or(0);
    if rest != Some(of_others * others) {
        return Err(refusal(format!(
            "{layers} layers do not divide among {stages} stages as `--num-layers` and the flags of stages say"
        )));
    }
    let mut of_stage = vec![of_others; usize::try_from(stages).unwrap_or(0)];
    let last = of_stage.len() - 1;
    for (stage, n) in [0, last].into_iter().zip(ends) {
        of_stage[stage] = n.unwrap_or(of_stage[stage]);
    }
    let chunks = match each {
        Some(each) if of_others.is_multiple_of(each) => of_others / each,
        Some(each) => {
            let message = format!("a stage of {of_others} layers does not divide into chunks of {each}");
            return Err(refusal(message));
        }
        None => chunks.unwrap_or(1),
    };
    if let Some(n) = of_stage.iter().find(|n| !n.is_multiple_of(chunks)) {
        return Err(refusal(format!("a stage of {n} layers does not divide into {chunks} chunks")));
    }
    let mut of_chunk: Vec<u64> = (0..chunks).flat_map(|_| of_stage.iter().map(|n| n / chunks)).collect();
    let last = of_chunk.len() - 1;
    for (chunk, counted) in [0, last].into_iter().zip(counted) {
        of_chunk[chunk] -= counted;
    }
    if has_empty(&of_chunk) {
        return Err(refusal("a chunk of the pipeline between the first and the last has no layer"));
    }
    Ok(Cut { chunks, layers: Some(of_chunk) })
}

/// Whether a chunk has nothing: the first has the embedding, and the last the head.
fn has_empty(of_chunk: &[u64]) -> bool {
    of_chunk.iter().skip(1).rev().skip(1).any(|&n| n == 0)
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
    if has_empty(&chunks) {
        return Err(of_flag("has a chunk without a layer between the first and the last"));
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
        is(2, "--pipeline-model-parallel-layout E|(t|)*2L", 2, &[0, 1, 1, 0]);
        is(2, "--num-layers 2 --decoder-first-pipeline-num-layers 2", 1, &[2, 0]);
        is(3, "", 1, &[]);
    }

    #[test]
    fn cuts_that_do_not_divide_are_refused() {
        for (stages, flags, why) in [
            (4, "--num-layers 10", "10 layers do not divide among 4 stages"),
            (2, "--num-layers 6 --num-virtual-stages-per-pipeline-rank 2", "3 layers does not divide into 2"),
            (2, "--pipeline-model-parallel-layout Et|t|tL", "3 chunks"),
            (3, "--pipeline-model-parallel-layout Et||tL", "a chunk without a layer"),
            (2, "--pipeline-model-parallel-layout Et|mtL", "`m`"),
            (2, "--pipeline-model-parallel-layout E(t|tL", "is not made of chunks"),
            (2, "--pipeline-model-parallel-layout Et*99999999|tL", "is not made of chunks"),
            (2, "--pipeline-model-parallel-layout tt|tL", "the embedding"),
            (
                2,
                "--num-layers 9 --pipeline-model-parallel-layout Ett|ttL",
                "4 layers, and `--num-layers` is 9",
            ),
            (2, "--num-layers 8 --num-layers-per-virtual-pipeline-stage 3", "chunks of 3"),
            (2, "--num-layers-per-virtual-pipeline-stage 2", "needs `--num-layers`"),
            (
                2,
                "--num-layers 8 --num-layers-per-virtual-pipeline-stage 2 --decoder-last-pipeline-num-layers 2",
                "together",
            ),
            (
                2,
                "--num-layers 8 --decoder-last-pipeline-num-layers 2 --account-for-loss-in-pipeline-split",
                "together",
            ),
            (
                2,
                "--num-virtual-stages-per-pipeline-rank 2 --pipeline-model-parallel-layout Ett|ttL",
                "together",
            ),
            (1 << 40, "--num-layers 1099511627776", "at most 65536"),
            (
                4,
                "--num-layers 2 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
                "no layer",
            ),
        ] {
            let refused = layers(stages, flags).unwrap_err();
            assert!(refused.contains(why), "{flags}: {refused}");
        }
    }
}
