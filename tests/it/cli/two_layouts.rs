//! `run --mode decode` with layouts of prompts and of tokens: on the same ranks, and on ranks of their own.

use super::{refused, repository, said};

/// Prompts under heads and sequence, tokens under heads alone, on the same ranks: caches by heads stay where they are.
#[test]
fn prompts_and_tokens_have_layouts_of_their_own() {
    let dir = repository("tests/goldens/llama-gqa");
    let run = "run . --mode decode --inputs decode.safetensors --expect decode.safetensors --steps 8 --tolerance 1e-5";
    for (layouts, stays) in [
        ("--mesh tp=4 --prompt-strategy ulysses+megatron-tp --prompt-mesh ulysses=2,tp=2 --chunk 7", true),
        ("--mesh tp=4 --prompt-strategy ulysses+megatron-tp --prompt-mesh tp=2,ulysses=2", true),
        ("--mesh tp=2 --prompt-strategy ulysses --prompt-mesh ulysses=2", true),
        ("--mesh tp=2 --prompt-mesh dcp=2", false),
    ] {
        let out = said(&dir, &format!("{run} {layouts}"));
        assert!(out.contains("passed: tolerance 1e-5"), "{layouts}: {out}");
        assert_eq!(out.contains("caches stay where they are"), stays, "{layouts}: {out}");
    }
}

/// Prompts on ranks of their own, which send caches: as many bytes as ranks of tokens hold.
#[test]
fn two_pools_hand_caches_over() {
    let dir = repository("tests/goldens/llama-gqa");
    let run = "run . --mode decode --inputs decode.safetensors --expect decode.safetensors --steps 8 --tolerance 1e-5";
    for (layouts, first, last, messages) in [
        // Each of two ranks of prompts has all heads of half of the tokens.
        ("--mesh tp=2 --prompt-mesh dcp=2 --two-pools", "ranks 0 to 1", "ranks 2 to 3", "4 messages"),
        (
            "--mesh dp=2 --prompt-strategy ulysses --prompt-mesh ulysses=4 --chunk 7",
            "ranks 0 to 3",
            "ranks 4 to 5",
            "8 messages",
        ),
        (
            "--mesh cp=3 --strategy decode-reduce --prompt-mesh pp=2",
            "ranks 0 to 1",
            "ranks 2 to 4",
            "6 messages",
        ),
        ("--mesh tp=4 --prompt-mesh tp=2 --page 4", "ranks 0 to 1", "ranks 2 to 5", "6 messages"),
        ("--prompt-mesh tp=8", "ranks 0 to 7", "rank 8", "5 messages"),
        (
            "--mesh tp=2 --prompt-mesh pp=2 --micro-batches 2 --two-pools",
            "ranks 0 to 1",
            "ranks 2 to 3",
            "4 messages",
        ),
    ] {
        let out = said(&dir, &format!("{run} {layouts}"));
        assert!(out.contains("passed: tolerance 1e-5"), "{layouts}: {out}");
        let note = out.lines().find(|line| line.starts_with("note: prompts under")).unwrap();
        for word in [format!("on {first}, tokens"), format!("on {last}: "), format!("move in {messages}")] {
            assert!(note.contains(&word), "{layouts}: {note}");
        }
    }
    // Two groups of sequences have pages of their own, and both are of the one of prompts.
    let six = "run . --mode decode --prompt 1,2;3;4;5;6;7,8 --page 4 --mesh dp=2";
    assert!(said(&dir, &format!("{six} --prompt-mesh tp=2 --two-pools")).contains("passed"));
    let refusal = refused(&dir, &format!("{six} --prompt-mesh dp=3"));
    assert!(refusal.starts_with("error[C04]: pages of 2 and of 3 groups of sequences"), "{refusal}");
}
