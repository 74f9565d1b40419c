//! One file for each way to distribute attention: a program in, the program of one rank out, which computes the same on
//! virtual ranks and as a schedule.
//!
//! The first line of a file is a comment that holds the pipeline.

use std::path::Path;

use ithaca_ir::text;
use ithaca_kernels::oracle;
use ithaca_kernels::store::RandomTensors;
use ithaca_passes::pass::{Context, Unwatched, Volume, run_passes};
use ithaca_passes::pipeline;
use ithaca_passes::shard::STRATEGIES;

use super::check;
use crate::filetests::files;

/// The files with their names and pipelines; the program that other tests share has none.
fn cases() -> Vec<(String, String, String)> {
    let name = |path: &Path| path.file_stem().unwrap().to_string_lossy().into_owned();
    let pipeline = |source: &str| source.lines().next()?.strip_prefix("// ").map(str::to_owned);
    files("passes").into_iter().filter_map(|(path, s)| Some((name(&path), pipeline(&s)?, s))).collect()
}

#[test]
fn each_way_to_distribute_attention_has_a_file() {
    let cases = cases();
    for strategy in
        STRATEGIES.iter().map(|s| s.name()).filter(|&name| name != "single" && !name.ends_with("ep"))
    {
        let found = cases.iter().find(|(name, _, _)| name == strategy);
        let (_, pipeline, _) = found.unwrap_or_else(|| panic!("no file {strategy}.ith"));
        assert!(pipeline.contains(&format!("strategy={strategy},")), "{strategy}.ith runs {pipeline}");
    }
}

#[test]
fn text_in_and_text_out_and_the_same_numbers() {
    for (name, pipeline, source) in cases() {
        let program = text::parse(&source).unwrap_or_else(|d| panic!("{name}: {d:?}"));
        let passes = pipeline::parse(&pipeline).unwrap_or_else(|d| panic!("{name}: {d:?}"));
        let per_rank = run_passes(program.clone(), &passes, &mut Context::new(&Volume), &mut Unwatched)
            .unwrap_or_else(|d| panic!("{name}: {d:?}"));
        let tensors = RandomTensors::of_module(&program, 5);
        let expected = oracle::run::<f64>(&program, &tensors, &tensors).unwrap();
        let outcome = check::on_ranks(&per_rank, &tensors, &expected)
            .and_then(|()| check::as_schedule(&per_rank, &tensors, &expected));
        outcome.unwrap_or_else(|e| panic!("{name}: {e}"));
        insta::assert_snapshot!(name, text::print(&per_rank));
    }
}
