//! Steps of a small model in many layouts, held against the closed form and against each rank alone.

use ithaca_import::{Mode, Workload, program as import};
use ithaca_ir::order::Order;
use ithaca_layout::compile::compile;
use ithaca_layout::fuse::Fusion;
use ithaca_layout::shard::{OrderChoice, ShardOptions, parse_mesh};
use ithaca_pass::Volume;
use serde_json::json;

use super::*;
use crate::cluster::{SharedCores, Sourced};
use crate::simulate::simulate as closed_form;
use crate::simulate::tests::whole_ring;

fn llama() -> serde_json::Value {
    json!({
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 4, "vocab_size": 32,
        "tie_word_embeddings": false,
    })
}

/// Schedules of many layouts, of forward passes and training steps.
fn schedules() -> Vec<(String, Schedule)> {
    let forward = import(&llama(), "m", &Workload::prefill(4, 1 << 10)).unwrap();
    let train = Workload { mode: Mode::Train, ..Workload::prefill(4, 1 << 10) };
    let train = import(&llama(), "m", &train).unwrap();
    let layouts = [
        ("data-parallel", "dp=4"),
        ("ulysses", "ulysses=8"),
        ("ring", "ring=16"),
        ("usp", "ring=4,ulysses=4"),
        ("megatron-tp-sp", "tp=8"),
        ("megatron-cp-allgather", "cp=8"),
        ("dist-flash", "ring=4"),
        ("data-parallel+ulysses+megatron-tp-sp", "dp=2,ulysses=4,tp=4"),
        ("loongtrain", "outer=2,ring=4,ulysses=2"),
    ];
    let mut found = Vec::new();
    for (strategy, mesh) in layouts {
        for (name, module) in [("forward", &forward), ("training", &train)] {
            for fusion in [Fusion::PACK, Fusion::overlap(2)] {
                for order in [None, Some(OrderChoice::Contiguous)] {
                    let options = ShardOptions {
                        fusion,
                        order,
                        ..ShardOptions::new(strategy, parse_mesh(mesh).unwrap())
                    };
                    let title = format!("{name} {strategy} {mesh} {fusion}");
                    if let Ok(compiled) = compile(module, &options, &Volume) {
                        found.push((title, compiled.schedule));
                    }
                }
            }
        }
    }
    assert!(found.len() > 40, "{} layouts are legal", found.len());
    found
}

/// Kernels beside a collective and exposed time add up to all of its time.
#[test]
fn hidden_and_exposed_time_add_up() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    for (title, schedule) in schedules() {
        for class in &simulate(&cluster, &schedule, Record::Overlaps).unwrap().classes {
            let sum = |of: fn(&Overlap) -> f64| class.overlaps.iter().map(of).sum::<f64>();
            let exposed = sum(|o| o.exposed.iter().map(|(_, seconds)| seconds).sum());
            let beside = sum(|o| o.beside.iter().map(|(_, seconds)| seconds).sum());
            let expected: f64 = class.collectives.iter().map(|c| c.exposed).sum();
            assert!((exposed - expected).abs() <= 1e-9, "{title}: {exposed} of {expected}");
            assert!(beside + exposed <= sum(|o| o.seconds) + 1e-9, "{title}: {beside} and {exposed}");
        }
    }
}

/// Where no link is shared there is nothing that the closed form leaves out.
#[test]
fn private_links_give_what_the_closed_form_gives() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    let mut machine = Cluster::named("cpu").unwrap();
    machine.accelerator.shared_cores = Some(SharedCores {
        cores: Sourced { value: 4, source: "a test".to_owned() },
        flops: Sourced { value: 1e6, source: "a test".to_owned() },
    });
    for (title, schedule) in schedules() {
        for cluster in [&cluster, &machine] {
            let (found, expected) = (timed(cluster, &schedule), closed_form(cluster, &schedule));
            let title = format!("{title} on {}", cluster.name);
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
            let (a, b) = (found.seconds, expected.seconds);
            assert!(close(a, b), "{title}: {a} {b}");
            assert!(
                close(found.exposed(), expected.exposed()),
                "{title}: {} {}",
                found.exposed(),
                expected.exposed()
            );
            let sum = found.compute + found.exposed();
            assert!((sum - found.seconds).abs() <= 1e-9 * sum, "{title}: {sum} {}", found.seconds);
        }
    }
    for order in [Order::Contiguous, Order::Zigzag { parts: 8 }] {
        let (cluster, schedule) = whole_ring(8, order);
        near(timed(&cluster, &schedule).seconds, closed_form(&cluster, &schedule).seconds);
    }
}

/// A link is shared by the ranks that use it, so no step takes longer than in the closed form, where all ranks use it at once.
#[test]
fn shared_links_take_no_longer_than_all_at_once() {
    for name in ["l20-pcie", "a100-pcie", "cpu"] {
        let cluster = Cluster::named(name).unwrap();
        for (title, schedule) in schedules() {
            let (found, most) = (timed(&cluster, &schedule), closed_form(&cluster, &schedule));
            assert!(
                found.seconds <= most.seconds * (1.0 + 1e-9),
                "{name} {title}: {} {}",
                found.seconds,
                most.seconds
            );
        }
    }
}

/// A class that stands for many ranks takes as long as each of them.
#[test]
fn ranks_that_are_alike_do_what_they_would_alone() {
    for name in ["dgx-h100", "l20-pcie"] {
        let cluster = Cluster::named(name).unwrap();
        for (title, schedule) in schedules() {
            let together = Alike::of(&cluster, &schedule, COMBINATIONS, alike::by_peers).unwrap();
            let each = |_: &Cluster, schedule: &Schedule, _: Vec<usize>| {
                (0..schedule.space.mesh.ranks() as usize).collect()
            };
            let apart = Alike::of(&cluster, &schedule, COMBINATIONS, each).unwrap();
            let one = run(&cluster, &schedule, Record::Times, (&together.0, &together.1)).unwrap();
            let all = run(&cluster, &schedule, Record::Times, (&apart.0, &apart.1)).unwrap();
            assert_eq!(all.classes.len() as u64, schedule.space.mesh.ranks());
            assert_eq!(one.classes.iter().map(|c| c.ranks).sum::<u64>(), schedule.space.mesh.ranks());
            for class in &all.classes {
                let alike = &one.classes[together.0.class(class.rank)].time;
                let (a, b) = (class.time.seconds, alike.seconds);
                assert!((a - b).abs() <= 1e-9 * b, "{name} {title} rank {}: {a} {b}", class.rank);
            }
        }
    }
}

/// Eight places in a node, whatever the length of a balanced ring.
#[test]
fn a_balanced_ring_has_as_many_classes_as_a_node_has_places() {
    let (cluster, schedule) = whole_ring(64, Order::Zigzag { parts: 64 });
    let outcome = simulate(&cluster, &schedule, Record::Times).unwrap();
    assert!(outcome.classes.len() <= 8, "{}", outcome.classes.len());
    near(outcome.last().unwrap().time.seconds, closed_form(&cluster, &schedule).seconds);
}

/// Spans are the same run: they fill the compute stream for as long as it is busy, and never overlap on a stream.
#[test]
fn spans_add_up() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    for (title, schedule) in schedules() {
        let outcome = simulate(&cluster, &schedule, Record::Spans { most: usize::MAX }).unwrap();
        for class in &outcome.classes {
            for stream in Stream::ALL {
                let mut spans: Vec<&Span> =
                    outcome.spans.iter().filter(|s| s.rank == class.rank && s.stream == stream).collect();
                spans.sort_by(|a, b| a.start.total_cmp(&b.start));
                assert!(spans.windows(2).all(|w| w[0].end <= w[1].start + 1e-12), "{title}: spans overlap");
                let busy: f64 = spans.iter().map(|s| s.end - s.start).sum();
                let expected = class.time.occupancy(stream) * class.time.seconds;
                assert!(
                    (busy - expected).abs() <= 1e-9 * expected.max(1e-6),
                    "{title} {stream}: {busy} {expected}"
                );
            }
        }
    }
}

/// Of a timeline that lists few runs the others are folded, and sums stay those of the step.
#[test]
fn folded_runs_add_up() {
    let cluster = Cluster::named("dgx-h100").unwrap();
    for (title, schedule) in schedules() {
        let all = simulate(&cluster, &schedule, Record::Spans { most: usize::MAX }).unwrap();
        let few = simulate(&cluster, &schedule, Record::Spans { most: 40 }).unwrap();
        assert!(all.folds.is_empty() && few.spans.len() <= all.spans.len(), "{title}");
        for class in &few.classes {
            let spans: Vec<&Span> = few.spans.iter().filter(|s| s.rank == class.rank).collect();
            let folds: Vec<_> = few.folds.iter().filter(|f| f.rank == class.rank).collect();
            if spans.is_empty() && folds.is_empty() {
                continue;
            }
            let runs = spans.len() as u64 + folds.iter().map(|f| f.runs).sum::<u64>();
            assert_eq!(runs, all.spans.iter().filter(|s| s.rank == class.rank).count() as u64, "{title}");
            let on = |stream: Stream| {
                let listed = spans.iter().filter(|s| s.stream == stream).map(|s| s.end - s.start);
                let folded = folds.iter().filter(|f| f.stream == stream).map(|f| f.busy);
                listed.chain(folded).sum::<f64>()
            };
            let compute = class.time.compute;
            assert!((on(Stream::Compute) - compute).abs() <= 1e-9 * compute.max(1e-6), "{title}");
            let listed = few.exposed.iter().filter(|e| e.rank == class.rank).map(|e| e.end - e.start);
            let exposed: f64 = listed.chain(folds.iter().map(|f| f.exposed)).sum();
            assert!((exposed - class.time.exposed()).abs() <= 1e-9 * class.time.seconds, "{title}");
        }
    }
}
