//! Logs are read as they were meant, and figures come back from the points that they make.

use std::fmt::Write;

use ithaca_ir::{DType, Span};

use super::*;
use crate::cluster::Sourced;

/// A log as nccl-tests prints it: `count` counts elements of f32, and each row is bytes and microseconds.
fn log(test: &str, hosts: u64, per_host: u64, rows: &[(u64, f64)]) -> String {
    let ranks = hosts * per_host;
    let mut out = String::from(
        "# nThread 1 nGpus 1 minBytes 65536 maxBytes 1073741824 step: 4(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0\n#\n# Using devices\n",
    );
    for rank in 0..ranks {
        let (host, device) = (rank / per_host, rank % per_host);
        let _ = writeln!(
            out,
            "#  Rank {rank:2} Group  0 Pid {:6} on node-{host:04} device {device:2} [0x1b] NVIDIA H100 80GB HBM3",
            4000 + rank
        );
    }
    out.push_str(
        "node-0000:4000:4000 [0] NCCL INFO Bootstrap : Using eth0
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
",
    );
    let n = ranks as f64;
    let (redop, factor, shares) = match test {
        "all_reduce" => ("sum", 2.0 * (n - 1.0) / n, 1),
        "all_gather" | "alltoall" => ("none", (n - 1.0) / n, ranks),
        "reduce_scatter" => ("sum", (n - 1.0) / n, ranks),
        _ => ("sum", 1.0, 1),
    };
    for &(bytes, micros) in rows {
        let count = bytes / 4 / shares;
        let rate = bytes as f64 / micros / 1e3;
        let part = format!("{micros:8.2} {rate:7.2} {:7.2}", rate * factor);
        let wrong = if test == "alltoall" { "N/A" } else { "0" };
        let _ = writeln!(
            out,
            "{bytes:12} {count:13}     float {redop:>7}      -1 {part}      0 {part} {wrong:>6}"
        );
    }
    out.push_str("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 101.5\n#\n");
    out
}

const ROWS: [(u64, f64); 3] = [(1 << 16, 20.25), (1 << 22, 50.5), (1 << 30, 4000.0)];

fn groups(points: &[Point]) -> Vec<(&'static str, u64, u64, u64, f64)> {
    let group = |point: &Point| match point.work {
        Work::Collective(g) => (g.name(), g.ranks, g.hosts, g.bytes, point.seconds * 1e6),
        Work::Kernel(_) | Work::Stream { .. } => unreachable!("a log has collectives"),
    };
    points.iter().map(group).collect()
}

#[test]
fn each_log_gives_the_bytes_that_curves_are_named_by() {
    for (test, name) in [
        ("all_reduce", "all_reduce"),
        ("all_gather", "all_gather"),
        ("reduce_scatter", "reduce_scatter"),
        ("alltoall", "all_to_all"),
        ("sendrecv", "permute"),
    ] {
        let text = log(test, 1, 8, &ROWS);
        let expected: Vec<_> = ROWS.iter().map(|&(bytes, micros)| (name, 8, 1, bytes, micros)).collect();
        let named = format!("$ mpirun -np 8 ./build/{test}_perf -b 64K\n{text}");
        let labelled = named.lines().map(|line| format!("[1,0]<stdout>:{line}\n")).collect::<String>();
        for points in [
            nccl_tests("x.log", None, &named),
            nccl_tests("x.log", None, &labelled),
            nccl_tests("x.log", Some(test), &text),
            nccl_tests(&format!("logs/{test}-8.txt"), None, &text),
            nccl_tests("x.log", None, &format!("# Collective test starting: {test}_perf\n{text}")),
        ] {
            let found = groups(&points.unwrap());
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(
                    (found.0, found.1, found.2, found.3),
                    (expected.0, expected.1, expected.2, expected.3)
                );
                assert!((found.4 / expected.4 - 1.0).abs() < 1e-9);
            }
        }
    }
    let both = log("all_reduce", 2, 8, &ROWS[..1])
        .replace("# nThread", "# Collective test starting: all_reduce_perf\n# nThread")
        + &log("all_gather", 4, 1, &ROWS[..1])
            .replace("# nThread", "# Collective test starting: all_gather_perf\n# nThread");
    let found = groups(&nccl_tests("x.log", None, &both).unwrap());
    assert_eq!((found[0].0, found[0].1, found[0].2), ("all_reduce", 16, 2));
    assert_eq!((found[1].0, found[1].1, found[1].2), ("all_gather", 4, 4));
}

#[test]
fn a_log_with_a_mistake_is_refused_with_its_line() {
    let text = log("all_reduce", 1, 8, &ROWS);
    let refusal = |test: Option<&str>, text: &str| {
        let mistakes = nccl_tests("x.log", test, text).unwrap_err();
        assert_eq!(mistakes.len(), 1, "{mistakes:?}");
        assert!(mistakes[0].code == "M23" && !mistakes[0].helps.is_empty());
        let at = mistakes[0].span.map_or("", |span| &text[span.start as usize..span.end as usize]);
        (mistakes[0].message.clone(), at.to_owned())
    };
    let given = Some("all_reduce");
    let row = text.lines().find(|line| line.contains(" 4194304 ")).unwrap();
    let with = |from: &str, to: &str| text.replacen(row, &row.replacen(from, to, 1), 1);
    let (message, at) = refusal(given, &with("      0", "     17"));
    assert_eq!(
        (message.as_str(), at.as_str()),
        ("17 elements of all_reduce of 4194304 bytes are wrong", "17")
    );
    let (message, at) = refusal(given, &with("50.50", "  nan"));
    assert_eq!((message.as_str(), at.as_str()), ("`time` is `nan`, which is no positive number", "nan"));
    let (message, at) = refusal(given, &text.replacen(row, &row[..40], 1));
    assert_eq!(message, "a row of all_reduce has 3 of 13 columns");
    assert!(at.starts_with("4194304"));
    assert_eq!(refusal(None, &text).0, "`x.log` does not name its test");
    let (message, _) = refusal(Some("all_gather"), &text);
    assert_eq!(message, "`size` is 65536, and 16384 elements of 4 bytes are 524288 in all_gather of 8 ranks");
    let without: String =
        text.lines().filter(|line| !line.contains("Rank  7")).map(|l| format!("{l}\n")).collect();
    assert_eq!(
        refusal(given, &without).0,
        "`busbw` is 1.750 times `algbw`, and 1.714 times in all_reduce of 7 ranks"
    );
    assert!(refusal(given, "Segmentation fault\n").0.contains("no row"));
    assert!(refusal(Some("broadcast"), &text).0.contains("no test"));
}

#[test]
fn a_table_of_kernels_is_refused_by_cell() {
    let table = "kind,dtype,m,n,k,heads,queries,width,direction,bytes,microseconds\n\
                 matmul,bf16,4096,4096,4096,,,,,,200\n\
                 # a comment\n\
                 attention,bf16,,,,32,8192,128,backward,,5000\n\
                 memory,,,,,,,,,1048576,4.5\n";
    let points = kernels("k.csv", table).unwrap();
    assert_eq!(
        points.iter().map(|p| p.work.kind()).collect::<Vec<_>>(),
        ["matmul bf16", "attention backward bf16", "memory"]
    );
    for (from, to, message) in [
        ("4096,,,,,,200", "4096,,,,,,-3", "`microseconds` is `-3`, and not a positive number"),
        ("matmul,bf16,4096", "matmul,bf16,4k", "`m` is `4k`, and not a whole number of at least 1"),
        ("matmul,bf16", "matmul,int8", "`dtype` is `int8`, and not bf16, f16, f32 or f64"),
        ("matmul,", "conv,", "`kind` is `conv`, and not matmul, attention or memory"),
        ("8192,128", ",128", "a row of `attention` has no `queries`"),
        ("heads,queries", "haeds,queries", "unknown column `haeds` in a table of kernels"),
    ] {
        let mistakes = kernels("k.csv", &table.replacen(from, to, 1)).unwrap_err();
        assert_eq!(mistakes[0].message, message);
        assert!(mistakes[0].code == "M23" && mistakes[0].span.is_some());
    }
    let base = Cluster::named("dgx-h100").unwrap();
    let fast = kernels("k.csv", &table.replacen(",200\n", ",100\n", 1)).unwrap();
    let (point, refusal) = calibrate(&base, "ours", &fast).unwrap_err();
    assert_eq!((point, refusal.code), (0, "M24"));
    assert!(refusal.message.contains("above the 9.890e14 of `accelerator.peak.bf16`"), "{refusal}");
}

/// Points that a cluster makes: kernels of several shapes, and collectives of a node, of all nodes and of one rank of each.
fn made_by(cluster: &Cluster) -> Vec<Point> {
    let mut works = Vec::new();
    for sizes in [[8192, 8192, 8192], [512, 512, 512], [4096, 4096, 256], [512, 4096, 4096], [64, 8192, 8192]]
    {
        works.push(Work::Kernel(Box::new(Kernel::product(DType::BF16, 1, sizes))));
    }
    for direction in [Direction::Forward, Direction::Backward] {
        for (width, queries) in [(64, 1024), (64, 8192), (128, 1024), (128, 8192)] {
            let sizes = AttentionSizes { batch: 2, heads: 32, kv_heads: 8, queries, keys: queries, width };
            works.push(Work::Kernel(Box::new(Kernel::attention(DType::BF16, sizes, true, direction))));
        }
    }
    works.extend([1 << 12, 1 << 20, 1 << 26, 1 << 30].map(|bytes| Work::Stream { name: None, bytes }));
    let node = cluster.devices_per_node.value;
    for collective in
        [Some(Collective::AllReduce), Some(Collective::AllGather), Some(Collective::AllToAll), None]
    {
        for (ranks, hosts) in [(2, 1), (node, 1), (2 * node, 2), (4, 4)] {
            works.extend(
                [1 << 14, 1 << 20, 1 << 30]
                    .map(|bytes| Work::Collective(Group { collective, ranks, hosts, bytes })),
            );
        }
    }
    let point = |work: Work| Point {
        seconds: work.seconds(cluster),
        work,
        source: "a test".to_owned(),
        span: Span::default(),
    };
    works.into_iter().map(point).collect()
}

#[test]
fn figures_come_back_from_the_points_that_they_make() {
    for name in ["dgx-a100-80gb", "l20-pcie"] {
        let mut truth = Cluster::named(name).unwrap();
        truth.levels.iter_mut().for_each(|level| level.measured = None);
        let mut all =
            vec![Figure::Launch, Figure::Memory, Figure::Matmul, Figure::MatmulTerms, Figure::MatmulResults];
        for direction in [Direction::Forward, Direction::Backward] {
            all.extend([
                Figure::Attention(direction),
                Figure::AttentionColumns(direction),
                Figure::AttentionKeys(direction),
            ]);
        }
        for level in [0, truth.levels.len() - 1] {
            all.extend([
                Figure::Latency(level),
                Figure::MessageLatency(level),
                Figure::RingEfficiency(level),
                Figure::ExchangeEfficiency(level),
            ]);
            all.extend(truth.levels[level].ring_start.is_some().then_some(Figure::RingStart(level)));
            all.extend(truth.levels[level].exchange_start.is_some().then_some(Figure::ExchangeStart(level)));
        }
        let mut base = truth.clone();
        for (i, figure) in all.iter().enumerate() {
            figure.of(&mut truth);
            let Sourced { value, .. } = figure.of(&mut base);
            *value *= [0.5, 0.8, 0.6][i % 3];
        }
        let found = calibrate(&base, "ours", &made_by(&truth)).unwrap();
        for row in &found.rows {
            assert!(row.after < 0.01 && row.after <= row.before, "{name} {row:?}");
        }
        // The prices of links without the curves.
        let mut fitted = found.cluster.clone();
        assert!(fitted.levels[0].measured.take().is_some());
        for figure in all {
            let (found, expected) = (figure.of(&mut fitted).value, figure.of(&mut truth).value);
            assert!((found / expected - 1.0).abs() < 0.01, "{name} {figure:?}: {found}, not {expected}");
        }
        let text = found.cluster.to_toml();
        assert_eq!(Cluster::parse("ours.toml", &text).unwrap().to_toml(), text);
    }
}

/// Links of a node bound the first prediction, so that no time depends on the links between nodes.
#[test]
fn slow_links_between_fast_nodes_are_found() {
    for (test, bus, hosts) in [("all_reduce", 20e9, 2), ("reduce_scatter", 10e9, 8)] {
        let n = (8 * hosts) as f64;
        let factor = if test == "all_reduce" { 2.0 } else { 1.0 } * (n - 1.0) / n;
        let row = |log: u32| {
            let bytes = 1_u64 << log;
            (bytes, 60.0 + bytes as f64 * factor / bus * 1e6)
        };
        let rows: Vec<(u64, f64)> = (16..31).step_by(2).map(row).collect();
        let text = format!("./build/{test}_perf\n{}", log(test, hosts, 8, &rows));
        let points = nccl::parse("x.log", None, &text).unwrap();
        let found = calibrate(&Cluster::named("dgx-h100").unwrap(), "slow", &points).unwrap();
        for row in &found.rows {
            assert!(row.before > 0.1 && row.after < 0.02, "{test} {row:?}");
        }
    }
}

/// Our kernels on an H200, microseconds forward and backward: heads, key/value heads, tokens, width, causal (performance.md, On a GPU).
#[test]
fn attention_of_ours_takes_what_an_h200_measured() {
    let cluster = Cluster::named("dgx-h200").unwrap().with_attention_kernel("ithaca").unwrap();
    for ([heads, kv_heads, tokens, width], is_causal, measured) in [
        ([16, 16, 8192, 128], true, [646.8, 2454.3]),
        ([16, 16, 8192, 128], false, [1216.3, 5147.5]),
        ([32, 32, 8192, 64], true, [1018.1, 3714.6]),
        ([32, 8, 4096, 128], true, [363.8, 1288.3]),
    ] {
        let sizes = AttentionSizes { batch: 1, heads, kv_heads, queries: tokens, keys: tokens, width };
        for (direction, micros) in [Direction::Forward, Direction::Backward].into_iter().zip(measured) {
            let kernel = Kernel::attention(DType::BF16, sizes, is_causal, direction);
            let error = kernel.seconds(&cluster) * 1e6 / micros - 1.0;
            assert!(error.abs() < 0.04, "{sizes:?} {direction:?}: {error:+.3}");
        }
    }
}
