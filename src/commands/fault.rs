//! `--fault`: parses the place and kind of an injected failure.

use ithaca_ir::{Diagnostic, Rank};
use ithaca_kernels::cpu::{Fault, FaultKind};

use crate::error::Result;

/// Reads `RANK:FRAME/TASK[:LAYER][=KIND]`.
///
/// # Errors
/// `C00`, with the form.
pub(super) fn parse(text: &str) -> Result<Fault> {
    let refuse = |problem: String| {
        Diagnostic::new("C00", format!("`--fault {text}`: {problem}"))
            .help("write RANK:FRAME/TASK[:LAYER][=KIND], such as `--fault 1:block/4:0=panic`")
            .help("KIND is error (the default), panic or hang")
    };
    let number = |word: &str, noun: &str| {
        word.parse::<u64>().map_err(|_| refuse(format!("`{word}` is not the number of a {noun}")))
    };
    let (place, kind) = text.rsplit_once('=').unwrap_or((text, "error"));
    let kind = match kind {
        "error" => FaultKind::Error,
        "panic" => FaultKind::Panic,
        "hang" => FaultKind::Hang,
        other => return Err(refuse(format!("there is no kind `{other}`")).into()),
    };
    let (rank, place) = place.split_once(':').ok_or_else(|| refuse("it names no rank".to_owned()))?;
    let (frame, place) = place.rsplit_once('/').ok_or_else(|| refuse("it names no task".to_owned()))?;
    let (task, layer) = match place.split_once(':') {
        Some((task, layer)) => (task, Some(number(layer, "layer")?)),
        None => (place, None),
    };
    let task = number(task, "task")?;
    let task = usize::try_from(task).map_err(|_| refuse(format!("there is no task {task}")))?;
    Ok(Fault { rank: Rank(number(rank, "rank")?), frame: frame.to_owned(), task, layer, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read() {
        let fault = |task, layer, kind| Fault { rank: Rank(3), frame: "block".to_owned(), task, layer, kind };
        assert_eq!(parse("3:block/7").unwrap(), fault(7, None, FaultKind::Error));
        assert_eq!(parse("3:block/7:2").unwrap(), fault(7, Some(2), FaultKind::Error));
        assert_eq!(parse("3:block/0=hang").unwrap(), fault(0, None, FaultKind::Hang));
        assert_eq!(parse("3:block/7:11=panic").unwrap(), fault(7, Some(11), FaultKind::Panic));
        for text in ["", "3", "3:block", "block/3", "x:block/3", "3:block/x", "3:block/3:x", "3:block/3=x"] {
            assert!(parse(text).unwrap_err().render().contains("--fault"), "{text}");
        }
    }
}
