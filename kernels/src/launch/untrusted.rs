//! Frames of bytes that nobody trusts: the entry of fuzzing.

use ithaca_ir::Rank;
use ithaca_ir::schedule::Stream;

use super::frame::{self, Kind, Limits};
use super::listener::Hello;
use crate::cpu::{RankResult, Timings};
use crate::tensor::Tensor;

const LIMITS: Limits = Limits { block: 1 << 12, tensors: 1 << 16 };

/// Reads bytes as the frames of another process and decodes their bodies, until one is refused.
///
/// # Panics
/// When a frame is accepted beyond its limit, or a block is not what its bytes spell.
pub fn read_frames(bytes: &[u8]) {
    let mut input = bytes;
    while let Ok((kind, body)) = frame::read(&mut input, || LIMITS) {
        assert!(body.len() as u64 <= kind.limit(&LIMITS), "{kind:?} of {} bytes", body.len());
        match kind {
            Kind::Block => {
                if let Some((stream, block)) = frame::block(&body) {
                    let mut written = Vec::new();
                    frame::write_block(&mut written, stream, &block).expect("a vector takes all bytes");
                    assert!(written.ends_with(&body), "a block is written as it was read");
                }
            }
            Kind::Hello => drop(frame::decode::<Hello>(&body)),
            Kind::Addresses => drop(frame::decode::<Vec<(String, u16)>>(&body)),
            Kind::Agree => drop(frame::decode::<Vec<(String, u64)>>(&body)),
            Kind::Shared => drop(frame::decode::<Vec<u8>>(&body)),
            Kind::Result => drop(frame::decode::<(RankResult, u64)>(&body)),
            Kind::Update => drop(frame::decode::<Option<(String, Tensor<f32>)>>(&body)),
            Kind::ExitCode => drop(frame::decode::<u8>(&body)),
            Kind::Abort => drop(frame::decode::<(u64, String)>(&body)),
            Kind::Connected | Kind::End | Kind::Alive | Kind::Finalize => drop(frame::decode::<()>(&body)),
        }
    }
}

/// Frames of every kind with a body.
pub fn example_frames() -> Vec<Vec<u8>> {
    let tensor = Tensor { shape: vec![2], data: vec![1.0f32, -0.5] };
    let result = RankResult {
        rank: Rank(1),
        outputs: vec![vec![0.25, f32::NAN]],
        written: vec![Vec::new()],
        arena_used: 64,
        timings: Timings::default(),
        traffic: Vec::new(),
        spans: Vec::new(),
    };
    let mut block = Vec::new();
    frame::write_block(&mut block, Stream::Comm, &[0.5; 3]).expect("a vector takes all bytes");
    let framed = |kind, body: Vec<u8>| {
        let mut bytes = Vec::new();
        frame::write(&mut bytes, kind, &body).expect("a vector takes all bytes");
        bytes
    };
    vec![
        block,
        framed(Kind::Hello, frame::encode(&Hello { rank: 1, world: 4, port: 29_500 })),
        framed(Kind::Addresses, frame::encode(&vec![("10.0.0.7".to_owned(), 29_500u16)])),
        framed(Kind::Agree, frame::encode(&vec![("schedule".to_owned(), 7u64)])),
        framed(Kind::Result, frame::encode(&(result, 4096u64))),
        framed(Kind::Update, frame::encode(&Some(("w", &tensor)))),
        framed(Kind::Abort, frame::encode(&(2u64, "a failure"))),
        framed(Kind::End, Vec::new()),
    ]
}
