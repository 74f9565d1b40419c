//! What movements send and how they share work, against the formulas and the figures of the literature.

use ithaca_ir::boxes;
use ithaca_ir::mesh::Rank;
use ithaca_ir::ops::Op;
use ithaca_ir::traffic::{self, Traffic};
use ithaca_ir::verify::verify;
use ithaca_ir::{DType, Mask, Module};
use ithaca_passes::lower::lower;
use ithaca_passes::pass::Volume;
use ithaca_passes::shard::STRATEGIES;

use crate::accounting;
use crate::attention::case::{Case, Extent};

/// Causal or other self-attention, forward, one sequence of `tokens`.
fn forward(strategy: &str, mesh: &[(&'static str, u64)], tokens: u64, mask: Mask) -> Case {
    Case { mask, extent: Extent::Output, ..Case::new(strategy, mesh, tokens) }
}

/// The only axis of a strategy.
fn axis(strategy: &str) -> &'static str {
    let [axis] = STRATEGIES.iter().find(|s| s.name() == strategy).unwrap().axes() else {
        panic!("`{strategy}` has one axis")
    };
    axis
}

fn per_rank(case: &Case) -> Module {
    case.per_rank(&case.whole()).unwrap_or_else(|d| panic!("{}: {d:?}", case.pipeline()))
}

fn sent(case: &Case) -> Vec<Traffic> {
    traffic::of_module(&per_rank(case))
}

/// Collectives and bytes of one kind, over all axes.
fn total(rows: &[Traffic], kind: &str) -> (u64, u64) {
    let of_kind = rows.iter().filter(|r| r.kind == kind);
    of_kind.fold((0, 0), |(count, bytes), r| (count + r.count, bytes + r.bytes_sent_per_rank))
}

/// `N/P · 2·Hkv·D`: elements of the keys and values of one rank.
fn keys_and_values(case: &Case, ranks: u64) -> u64 {
    case.n_keys() / ranks * 2 * case.kv_heads * case.width
}

#[test]
fn a_ring_passes_keys_and_values_on_once_less_than_there_are_ranks() {
    for dtype in [DType::BF16, DType::F32] {
        for (ranks, group, mask) in [
            (2, 1, Mask::Full),
            (4, 2, Mask::Causal),
            (8, 3, Mask::Full),
            (16, 1, Mask::Causal),
            (5, 2, Mask::Causal),
        ] {
            let case = Case { dtype, group, ..forward("ring", &[("ring", ranks)], 4 * ranks, mask) };
            let rows = sent(&case);
            let expected = (ranks - 1) * keys_and_values(&case, ranks) * dtype.bytes();
            assert_eq!(total(&rows, "permute"), (2 * (ranks - 1), expected), "{ranks} ranks: {rows:?}");
            assert_eq!(rows.len(), 1, "{rows:?}");
        }
    }
}

#[test]
fn the_way_back_carries_gradients_in_single_precision_all_the_way_home() {
    for dtype in [DType::BF16, DType::F32] {
        for ranks in [2, 4, 8] {
            let case = forward("ring", &[("ring", ranks)], 4 * ranks, Mask::Causal);
            let forth = Case { dtype, extent: Extent::Forward, ..case };
            let both = Case { extent: Extent::Backward, ..forth.clone() };
            let (forth_count, forth_bytes) = total(&sent(&forth), "permute");
            let (count, bytes) = total(&sent(&both), "permute");
            assert_eq!(count - forth_count, 2 * (ranks - 1) + 2 * ranks, "{ranks} ranks");
            let held = keys_and_values(&both, ranks);
            assert_eq!(
                bytes - forth_bytes,
                (ranks - 1) * held * dtype.bytes() + ranks * held * DType::F32.bytes(),
                "{ranks} ranks, {dtype}"
            );
        }
    }
}

#[test]
fn rings_in_rings_and_two_passes_send_what_a_ring_does() {
    for (strategy, mesh) in [
        ("rsa", vec![(axis("rsa"), 8)]),
        ("megatron-cp-p2p", vec![(axis("megatron-cp-p2p"), 8)]),
        ("loongtrain", vec![("outer", 2), ("ring", 4), ("ulysses", 1)]),
        ("loongtrain", vec![("outer", 4), ("ring", 2), ("ulysses", 1)]),
    ] {
        let case = forward(strategy, &mesh, 32, Mask::Full);
        let rows = sent(&case);
        let expected = 7 * keys_and_values(&case, 8) * case.dtype.bytes();
        assert_eq!(total(&rows, "permute"), (14, expected), "{strategy}: {rows:?}");
    }
}

#[test]
fn gathering_sends_as_much_as_a_ring_and_gradients_are_scattered_back() {
    for ranks in [2, 4, 8] {
        let forth = Case {
            dtype: DType::BF16,
            extent: Extent::Forward,
            ..forward(
                "megatron-cp-allgather",
                &[(axis("megatron-cp-allgather"), ranks)],
                4 * ranks,
                Mask::Causal,
            )
        };
        let both = Case { extent: Extent::Backward, ..forth.clone() };
        let gathered = (ranks - 1) * keys_and_values(&forth, ranks) * forth.dtype.bytes();
        let rows = sent(&forth);
        assert_eq!(total(&rows, "all_gather"), (2, gathered), "{rows:?}");
        assert_eq!(rows.len(), 1, "{rows:?}");
        let rows = sent(&both);
        assert_eq!(total(&rows, "all_gather").1 % gathered, 0, "{rows:?}");
        let scattered = (ranks - 1) * keys_and_values(&forth, ranks) * forth.dtype.bytes();
        assert_eq!(total(&rows, "reduce_scatter"), (2, scattered), "{rows:?}");
    }
}

/// MiB sent per rank in one layer's forward pass, bf16, heads 128 wide, 65 536 tokens.
#[test]
fn rings_and_gathers_send_what_the_table_of_published_sizes_says() {
    for (heads, kv_heads, mebibytes) in [
        (32, 32, [512, 768, 896, 960, 992]),
        (32, 8, [128, 192, 224, 240, 248]),
        (128, 8, [128, 192, 224, 240, 248]),
        (32, 1, [16, 24, 28, 30, 31]),
    ] {
        let module = accounting::published(heads, kv_heads);
        for (ranks, expected) in [2, 4, 8, 16, 32].into_iter().zip(mebibytes) {
            for (strategy, kind) in
                [("ring", "permute"), ("megatron-cp-p2p", "permute"), ("megatron-cp-allgather", "all_gather")]
            {
                let rows =
                    accounting::sent(&module, strategy, &format!("{}={ranks}", axis(strategy)), &Volume);
                let (_, bytes) = total(&rows, kind);
                assert_eq!(bytes, expected << 20, "{heads}/{kv_heads} on {ranks} under {strategy}: {rows:?}");
                assert_eq!(rows.len(), 1, "{rows:?}");
            }
        }
    }
}

/// The same for 64 heads of 8 groups on 8 ranks, by the degree of heads.
#[test]
fn two_dimensions_send_what_the_table_of_published_sizes_says() {
    let module = accounting::published(64, 8);
    for (ulysses, ring, exchanged, passed) in
        [(1, 8, 0, 224), (2, 4, 144, 96), (4, 2, 216, 32), (8, 1, 252, 0)]
    {
        for (strategy, mesh) in [
            ("usp", format!("ring={ring},ulysses={ulysses}")),
            ("usp", format!("ulysses={ulysses},ring={ring}")),
            ("loongtrain", format!("outer=1,ring={ring},ulysses={ulysses}")),
            ("loongtrain", format!("ulysses={ulysses},outer={ring},ring=1")),
        ] {
            let rows = accounting::sent(&module, strategy, &mesh, &Volume);
            assert_eq!(total(&rows, "all_to_all").1, exchanged << 20, "{strategy} {mesh}: {rows:?}");
            assert_eq!(total(&rows, "permute").1, passed << 20, "{strategy} {mesh}: {rows:?}");
        }
    }
}

/// Elements that `rank` receives from each other rank in all fetches.
fn received(module: &Module, rank: Rank) -> Vec<u64> {
    let space = &module.space;
    let mut from = vec![0; usize::try_from(space.mesh.ranks()).unwrap()];
    for function in module.functions.values() {
        for node in function.nodes.iter().filter(|n| matches!(n.op, Op::Fetch { .. })) {
            let (x, y) = (function.ty(node.operands[0]), function.ty(node.result()));
            let exchange = boxes::exchange(space, &node.op, x, y, rank);
            for (&peer, block) in exchange.group.iter().zip(&exchange.recv).filter(|&(&peer, _)| peer != rank)
            {
                from[usize::try_from(peer.0).unwrap()] += boxes::block_elements(block);
            }
        }
    }
    from
}

#[test]
fn a_window_fetches_from_as_many_neighbours_as_it_reaches_and_nothing_goes_to_the_first_rank() {
    let (ranks, shard) = (8, 4);
    for strategy in ["window-halo", "sparse-fetch"] {
        for window in 1..=4 * shard {
            let mask = Mask::Window { left: Some(window - 1), right: Some(0) };
            let case = forward(strategy, &[(axis(strategy), ranks)], ranks * shard, mask);
            let module = per_rank(&case);
            let row = 2 * case.kv_heads * case.width;
            for rank in 0..ranks {
                let from = received(&module, Rank(rank));
                let neighbours = (window - 1).div_ceil(shard).min(rank);
                for peer in 0..ranks {
                    let before = rank * shard - (window - 1).min(rank * shard);
                    let tokens = ((peer + 1) * shard).saturating_sub(before.max(peer * shard));
                    let expected = if peer < rank { tokens * row } else { 0 };
                    assert_eq!(from[peer as usize], expected, "window {window}: rank {rank} from {peer}");
                }
                let senders = from.iter().filter(|&&n| n > 0).count() as u64;
                assert_eq!(senders, neighbours, "window {window}: rank {rank}");
            }
        }
    }
}

#[test]
fn documents_that_lie_on_one_rank_each_move_nothing() {
    let documents = Mask::Documents((0..=8).map(|i| 6 * i).collect());
    for mask in [documents.clone(), Mask::All(vec![documents, Mask::Causal])] {
        let case = Case {
            extent: Extent::Backward,
            options: vec!["order=contiguous"],
            ..forward("sparse-fetch", &[(axis("sparse-fetch"), 8)], 48, mask)
        };
        let rows = sent(&case);
        assert!(rows.iter().all(|r| r.bytes_sent_per_rank == 0), "{rows:?}");
    }
}

#[test]
fn causal_documents_fetch_the_keys_they_see_and_no_more() {
    let mask = Mask::All(vec![Mask::Documents(vec![0, 7, 14, 16]), Mask::Causal]);
    let case = Case {
        options: vec!["order=contiguous"],
        ..forward("sparse-fetch", &[(axis("sparse-fetch"), 8)], 16, mask)
    };
    let module = per_rank(&case);
    let fetched: Vec<u64> =
        module.space.dims.values().filter(|d| d.fetched.is_some()).map(|d| d.size).collect();
    assert_eq!(fetched, [37]);
}

/// Kept pairs of the queries of each rank.
fn pairs(case: &Case) -> Vec<u128> {
    let module = per_rank(case);
    let space = &module.space;
    let main = &module.functions[module.main().unwrap()];
    let q =
        main.ty(main.nodes.iter().find(|n| matches!(&n.op, Op::Input(b) if b.name == "q")).unwrap().result());
    let of_rank = |rank: Rank| {
        let held = space.local_box(q, rank)[1].clone();
        let runs = space.position_runs(q.dims[1], held);
        runs.iter().map(|run| case.mask.pairs(run.positions(), 0..case.n_keys())).sum()
    };
    space.mesh.iter_ranks().map(of_rank).collect()
}

#[test]
fn zigzag_is_balanced_exactly_and_contiguous_is_not() {
    for (ranks, shard) in [(2, 4), (3, 2), (4, 8), (8, 2), (16, 2)] {
        let with = |order| Case {
            options: vec![order],
            ..forward("ring", &[("ring", ranks)], ranks * shard, Mask::Causal)
        };
        let zigzag = pairs(&with("order=zigzag"));
        assert!(zigzag.iter().all(|&n| n == zigzag[0]), "{ranks} ranks: {zigzag:?}");
        let default = pairs(&forward("ring", &[("ring", ranks)], ranks * shard, Mask::Causal));
        assert_eq!(default, zigzag, "the best-balanced order is the default");

        // The busiest rank has ((2P − 1)·T + 1) / (P·T + 1) of the mean, which tends to (2P − 1) / P.
        let contiguous = pairs(&with("order=contiguous"));
        let (busiest, all) = (*contiguous.iter().max().unwrap(), contiguous.iter().sum::<u128>());
        let [p, t] = [ranks, shard].map(u128::from);
        assert_eq!(busiest * p * (p * t + 1), all * ((2 * p - 1) * t + 1), "{ranks} ranks: {contiguous:?}");

        let striped = pairs(&with("order=striped"));
        let spread = striped.iter().max().unwrap() - striped.iter().min().unwrap();
        assert_eq!(spread, u128::from((ranks - 1) * shard), "one token of each stripe per rank: {striped:?}");
    }
}

/// For each rank, in how many attentions of the program it has queries and keys.
fn blocks(case: &Case) -> Vec<u64> {
    let module = per_rank(case);
    let space = &module.space;
    let main = &module.functions[module.main().unwrap()];
    let attentions: Vec<_> = main.nodes.iter().filter(|n| matches!(n.op, Op::Attention(_))).collect();
    let of_rank = |rank: Rank| {
        let busy = |v| space.local_shape(main.ty(v), rank).iter().product::<u64>() > 0;
        attentions.iter().filter(|n| busy(n.operands[0]) && busy(n.operands[1])).count() as u64
    };
    space.mesh.iter_ranks().map(of_rank).collect()
}

#[test]
fn balanced_blocks_take_half_the_steps_of_a_ring() {
    for ranks in 2..=9 {
        let case = forward("dist-flash", &[(axis("dist-flash"), ranks)], 2 * ranks, Mask::Causal);
        let blocks = blocks(&case);
        assert_eq!(blocks.iter().max(), Some(&(ranks / 2 + 1)), "{ranks} ranks: {blocks:?}");
        assert_eq!(blocks.iter().sum::<u64>(), ranks * (ranks + 1) / 2, "{ranks} ranks: {blocks:?}");
    }
}

/// As many elements as the whole of the queries, with as many key/value heads as query heads, where partial results are of the
/// model's type (DistFlashAttn, arXiv 2310.03294).
#[test]
fn balanced_blocks_are_sent_by_all_ranks_alike() {
    for ranks in [4, 8, 12, 16] {
        let mesh = [(axis("dist-flash"), ranks)];
        let case = Case {
            dtype: DType::F32,
            kv_heads: 2,
            group: 1,
            ..forward("dist-flash", &mesh, 4 * ranks, Mask::Causal)
        };
        let (_, bytes) = total(&sent(&case), "permute");
        let whole = case.queries * case.kv_heads * case.width * DType::F32.bytes();
        // A partial result comes with its lse; an early rank returns at most one in every step but the last.
        let lse = (ranks / 2 - 1) * case.queries / ranks * case.kv_heads * DType::F32.bytes();
        assert!(
            (whole..=whole + lse).contains(&bytes),
            "{ranks} ranks: {bytes} bytes, {whole} and {lse} expected"
        );
    }
}

#[test]
fn queries_that_rotate_leave_keys_where_they_are() {
    for ranks in [2, 4, 8] {
        for (extent, n_lse) in [(Extent::Forward, ranks), (Extent::Output, ranks - 1)] {
            let case = Case {
                dtype: DType::BF16,
                kv_heads: 1,
                group: 4,
                extent,
                ..forward("pass-q", &[(axis("pass-q"), ranks)], 4 * ranks, Mask::Full)
            };
            let rows = case.queries / ranks * 4;
            // Queries go on once less than there are ranks; outputs, in single precision, come home besides, and so does lse
            // where it is read there.
            let queries = (ranks - 1) * rows * case.width * DType::BF16.bytes();
            let partial = rows * (ranks * case.width + n_lse) * DType::F32.bytes();
            let sent = sent(&case);
            let messages = ranks - 1 + ranks + n_lse;
            assert_eq!(total(&sent, "permute"), (messages, queries + partial), "{extent:?}: {sent:?}");
            assert_eq!(sent.len(), 1, "{sent:?}");
        }
    }
}

#[test]
fn decoding_sends_the_same_however_long_the_cache_is() {
    for ranks in [2, 4] {
        let with = |keys: u64| {
            let mask = Mask::CausalAtEnd { queries: 2, keys };
            let case = forward("decode-reduce", &[(axis("decode-reduce"), ranks)], 2, mask);
            sent(&Case { keys: Some(keys), ..case })
        };
        let rows = with(16);
        assert_eq!(rows, with(64));
        assert!(rows.iter().all(|r| r.kind != "permute" && r.kind != "fetch"), "{rows:?}");
        assert!(rows.iter().any(|r| r.bytes_sent_per_rank > 0), "{rows:?}");
    }
}

/// Gathered in groups of heads, keys are as many bytes on the wire, and a rank holds those of one group only.
#[test]
fn keys_gathered_in_groups_are_as_many_and_take_less_memory() {
    for (ranks, heads, extent) in [(2, 1, Extent::Backward), (4, 2, Extent::Backward), (4, 1, Extent::Output)]
    {
        let mesh = [("cp", ranks), ("tp", heads)];
        // Wide enough for keys to be most of what there is.
        let whole = Case {
            kv_heads: 8 * heads,
            group: 1,
            width: 32,
            extent,
            ..Case::new("gspmd-2d", &mesh, 64 * ranks)
        };
        let whole = Case { dtype: DType::BF16, ..whole };
        let along = |case: &Case| sent(case).into_iter().filter(|row| row.axis == "cp").collect::<Vec<_>>();
        let plain = along(&whole);
        let peak = |case: &Case| lower(verify(&per_rank(case)).unwrap()).unwrap().arena_bytes();
        let mut before = peak(&whole);
        for groups in [2u64, 4, 8] {
            let option =
                ["movement=gather(groups=2)", "movement=gather(groups=4)", "movement=gather(groups=8)"];
            let case = Case { options: vec![option[groups.ilog2() as usize - 1]], ..whole.clone() };
            let rows = along(&case);
            for kind in ["all_gather", "reduce_scatter"] {
                let ((n, bytes), (n_plain, bytes_plain)) = (total(&rows, kind), total(&plain, kind));
                assert_eq!(
                    (n, bytes),
                    (groups * n_plain, bytes_plain),
                    "{kind} in {groups} groups: {rows:?}"
                );
            }
            let gathered = gathered_at_once(&case);
            assert_eq!(gathered * groups, gathered_at_once(&whole), "{groups} groups");
            let peak = peak(&case);
            // Beyond some number of groups something else is the peak.
            let less = if groups == 2 { peak < before } else { peak <= before };
            assert!(less, "{groups} groups take {peak} bytes, and {before} with half as many");
            before = peak;
        }
    }
}

/// The most elements of a tensor whose keys are whole.
fn gathered_at_once(case: &Case) -> u64 {
    let per_rank = per_rank(case);
    let along = per_rank.space.mesh.axis("cp").unwrap();
    let gathers = per_rank.functions.values().flat_map(|f| {
        let gathers =
            f.nodes.iter().filter(|n| matches!(n.op, Op::AllGather { axis, .. } if axis == along.into()));
        gathers.map(|n| per_rank.space.max_local_elements(f.ty(n.result()))).collect::<Vec<_>>()
    });
    gathers.max().unwrap()
}
