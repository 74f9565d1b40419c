//! The results of a rank, and named tensors, as bytes.

use std::time::Duration;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{FrameId, Stream};
use ithaca_ir::traffic::{Phase, Traffic};

use super::bytes::{Reader, Writer, malformed};
use crate::cpu::{RankResult, TaskSpan, Timing, Timings};
use crate::error::RunError;
use crate::tensor::Tensor;

/// The results of a rank, and the memory of its process.
pub(super) fn encode(result: &RankResult, memory_bytes: u64) -> Vec<u8> {
    let RankResult { rank, outputs, written, arena_used, timings, traffic, spans } = result;
    let mut out = Writer::new();
    out.number(rank.0).number(memory_bytes).number(*arena_used);
    for tensors in [outputs, written] {
        out.number(tensors.len() as u64);
        for data in tensors {
            out.floats(data);
        }
    }
    let timings = timings.rows();
    out.number(timings.len() as u64);
    for (work, Timing { count, total }) in timings {
        // 64 bits overflow after five hundred years.
        let nanoseconds = u64::try_from(total.as_nanos()).unwrap_or(u64::MAX);
        out.text(work).number(count).number(nanoseconds);
    }
    out.number(traffic.len() as u64);
    for Traffic { kind, axis, phase, count, bytes_sent_per_rank } in traffic {
        out.text(kind).text(axis).text(phase.name()).number(*count).number(*bytes_sent_per_rank);
    }
    out.number(spans.len() as u64);
    for TaskSpan { stream, frame, layer, task, start, end } in spans {
        out.number(*stream as u64).number(frame.index() as u64).number(*layer).number(*task as u64);
        for time in [start, end] {
            out.number(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        }
    }
    out.into_bytes()
}

/// Decodes the output of [`encode`].
pub(super) fn decode(bytes: &[u8]) -> Result<(RankResult, u64), RunError> {
    let mut input = Reader::new(bytes);
    let (rank, memory_bytes, arena_used) = (Rank(input.number()?), input.number()?, input.number()?);
    let outputs = input.list(Reader::floats)?;
    let written = input.list(Reader::floats)?;
    let timing = |input: &mut Reader<'_>| {
        let (work, count) = (input.text()?, input.number()?);
        Ok((work, Timing { count, total: Duration::from_nanos(input.number()?) }))
    };
    let timings: Timings = input.list(timing)?.into_iter().collect();
    let traffic = input.list(|input| {
        let (kind, axis, phase) = (input.text()?, input.text()?, input.text()?);
        let phase = Phase::parse(&phase);
        let (count, bytes_sent_per_rank) = (input.number()?, input.number()?);
        Ok(Traffic { kind, axis, phase: phase.ok_or_else(malformed)?, count, bytes_sent_per_rank })
    })?;
    let count =
        |input: &mut Reader<'_>| input.number().and_then(|n| usize::try_from(n).map_err(|_| malformed()));
    let spans = input.list(|input| {
        let stream = count(input)?;
        let stream = *Stream::ALL.get(stream).ok_or_else(malformed)?;
        // Handles have 32 bits.
        let frame = u32::try_from(input.number()?).map_err(|_| malformed())?;
        let (frame, layer, task) = (FrameId::new(frame as usize), input.number()?, count(input)?);
        let (start, end) = (Duration::from_nanos(input.number()?), Duration::from_nanos(input.number()?));
        Ok(TaskSpan { stream, frame, layer, task, start, end })
    })?;
    input.end()?;
    Ok((RankResult { rank, outputs, written, arena_used, timings, traffic, spans }, memory_bytes))
}

/// A tensor with its name.
pub(super) fn encode_tensor(name: &str, tensor: &Tensor<f32>) -> Vec<u8> {
    let mut out = Writer::new();
    out.text(name).number(tensor.shape.len() as u64);
    for &n in &tensor.shape {
        out.number(n as u64);
    }
    out.floats(&tensor.data);
    out.into_bytes()
}

/// Decodes the output of [`encode_tensor`].
pub(super) fn decode_tensor(bytes: &[u8]) -> Result<(String, Tensor<f32>), RunError> {
    let mut input = Reader::new(bytes);
    let name = input.text()?;
    let shape =
        input.list(|input| input.number().and_then(|n| usize::try_from(n).map_err(|_| malformed())))?;
    let data = input.floats()?;
    input.end()?;
    match shape.iter().try_fold(1usize, |all, &n| all.checked_mul(n)) {
        Some(n) if n == data.len() => Ok((name, Tensor::new(shape, data))),
        Some(_) | None => Err(malformed()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_survive_the_round_trip() {
        let timing = Timing { count: 2, total: Duration::from_nanos(1_234_567) };
        let row = Traffic {
            kind: "all_to_all".to_owned(),
            axis: "ulysses".to_owned(),
            phase: Phase::Backward,
            count: 4,
            bytes_sent_per_rank: 640,
        };
        let result = RankResult {
            rank: Rank(3),
            outputs: vec![vec![1.0, -0.0], vec![]],
            written: vec![vec![2.5]],
            arena_used: 4096,
            timings: [("einsum".to_owned(), timing)].into_iter().collect(),
            traffic: vec![row],
            spans: vec![TaskSpan {
                stream: Stream::Comm,
                frame: FrameId::new(1),
                layer: 7,
                task: 5,
                start: Duration::from_nanos(12),
                end: Duration::from_micros(34),
            }],
        };
        let bytes = encode(&result, 99);
        assert_eq!(decode(&bytes).unwrap(), (result, 99));
        for n in 0..bytes.len() {
            assert!(decode(&bytes[..n]).is_err(), "cut off after {n} bytes");
        }
    }

    #[test]
    fn tensors_survive_the_round_trip() {
        let tensor = Tensor::new(vec![2, 1], vec![0.5, 8.0]);
        let bytes = encode_tensor("w", &tensor);
        assert_eq!(decode_tensor(&bytes).unwrap(), ("w".to_owned(), tensor));
        let mut wrong = bytes.clone();
        wrong[8 + 1 + 8] = 3;
        assert!(decode_tensor(&wrong).is_err(), "a shape of another size");
    }
}
