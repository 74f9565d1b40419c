//! Masks against the dense matrix of pairs, and facts that distribution relies on.

use std::ops::Range;

use crate::dim::Dim;
use crate::mask::*;
use crate::ops::attr::{Attr, Names, NoFunctions};
use crate::ops::attribute::Value;
use crate::space::Space;

/// Numbers by SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }

    fn range(&mut self, n: u64) -> Range<u64> {
        let start = self.below(n);
        start..start + self.below(n + 1 - start)
    }

    /// A mask of `n_q` queries and `n_k` keys that nests joins at most `depth` deep.
    fn mask(&mut self, n_q: u64, n_k: u64, depth: u64) -> Mask {
        let n = n_q.min(n_k);
        match self.below(if depth > 0 { 17 } else { 12 }) {
            0 => Mask::Full,
            1 if n_q == n_k => Mask::Causal,
            1 => Mask::Window { left: None, right: Some(0) },
            2 => Mask::CausalAtEnd { queries: n_q, keys: n_k },
            3 => {
                let mut side = || (self.below(4) > 0).then(|| self.below(n + 2));
                Mask::Window { left: side(), right: side() }
            }
            4 => Mask::Prefix(1 + self.below(n)),
            11 => Mask::Chunks(1 + self.below(n)),
            5 => Mask::Sinks(1 + self.below(n)),
            6 => Mask::Global(1 + self.below(n)),
            7 if n_q == n_k => {
                let mut bounds = vec![0];
                bounds.extend((1..n).filter(|_| self.below(4) == 0));
                bounds.push(n);
                Mask::Documents(bounds)
            }
            7 | 8 => self.document_pairs(n_q, n_k),
            9 => {
                let mut at: Vec<u64> = (0..n_k).filter(|_| self.below(4) == 0).collect();
                at.push(at.last().map_or(0, |p| (p + 1).min(n_k - 1)));
                at.dedup();
                Mask::GlobalAt(at)
            }
            10 => {
                let size = 1 + self.below(5);
                let columns = n_k.div_ceil(size);
                let n_rows = self.below(n_q.div_ceil(size) + 1);
                let mut row = || (0..columns).filter(|_| self.below(2) == 0).collect();
                Mask::Blocks { size, rows: (0..n_rows).map(|_| row()).collect() }
            }
            i => {
                let masks = (0..2 + self.below(2)).map(|_| self.mask(n_q, n_k, depth - 1)).collect();
                if i % 2 == 0 { Mask::All(masks) } else { Mask::Any(masks) }
            }
        }
    }

    /// Documents of queries and keys, as many of both.
    fn document_pairs(&mut self, n_q: u64, n_k: u64) -> Mask {
        let documents = 1 + self.below(n_q.min(n_k).min(6));
        let mut bounds = |n: u64| {
            let mut inner: Vec<u64> = (1..n).collect();
            while inner.len() as u64 > documents - 1 {
                let i = self.below(inner.len() as u64);
                inner.remove(usize::try_from(i).unwrap());
            }
            [vec![0], inner, vec![n]].concat()
        };
        let (queries, keys) = (bounds(n_q), bounds(n_k));
        let causal = [None, Some(Align::Start), Some(Align::End)][usize::try_from(self.below(3)).unwrap()];
        Mask::DocumentPairs { queries, keys, causal }
    }
}

/// Calls `of` with names, of which masks have none.
fn with_names<T>(of: impl FnOnce(Names<'_>) -> T) -> T {
    of(Names { space: &Space::default(), functions: &NoFunctions })
}

/// The text of a mask.
fn text(mask: &Mask) -> String {
    with_names(|names| mask.to_attr(names)).to_string()
}

/// The mask that a text spells.
fn read(text: &str) -> Option<Mask> {
    let attr = crate::text::parse_attr(text).unwrap();
    with_names(|names| Mask::from_attr(attr, names)).ok()
}

/// The keys of a set of positions as intervals.
fn intervals(keys: Range<u64>, kept: impl Fn(u64) -> bool) -> Vec<Range<u64>> {
    let mut out: Vec<Range<u64>> = Vec::new();
    for k in keys.filter(|&k| kept(k)) {
        match out.last_mut() {
            Some(last) if last.end == k => last.end += 1,
            _ => out.push(k..k + 1),
        }
    }
    out
}

#[test]
fn random_masks_agree_with_the_dense_matrix() {
    for seed in 0..4000 {
        let mut random = Random(seed);
        let n_q = 1 + random.below(24);
        let n_k = if random.below(2) == 0 { n_q } else { 1 + random.below(24) };
        let mask = random.mask(n_q, n_k, 3);
        let (queries, keys) = (random.range(n_q + 3), random.range(n_k + 3));
        let what = format!("seed {seed}: {} on {queries:?} x {keys:?}", text(&mask));
        let mut dense = 0;
        for q in queries.clone() {
            let row = intervals(keys.clone(), |k| mask.allows(q, k));
            dense += row.iter().map(|r| u128::from(r.end - r.start)).sum::<u128>();
            assert_eq!(mask.runs(q, keys.clone()), row, "row {q}, {what}");
        }
        assert_eq!(mask.pairs(queries.clone(), keys.clone()), dense, "{what}");
        let all = u128::from(queries.end - queries.start) * u128::from(keys.end - keys.start);
        let tile = match dense {
            0 => Tile::Empty,
            n if n == all => Tile::Full,
            _ => Tile::Partial,
        };
        assert_eq!(mask.tile(queries.clone(), keys.clone()), tile, "{what}");
        let reached = intervals(keys.clone(), |k| queries.clone().any(|q| mask.allows(q, k)));
        assert_eq!(mask.reach(queries.clone(), keys.clone()), reached, "{what}");
        let strips = mask.strips(queries.clone(), keys.clone());
        assert!(strips.windows(2).all(|s| s[0].queries.end <= s[1].queries.start), "{what}: {strips:?}");
        if let Some((low, high)) = mask.offsets() {
            let band = |q: u64, k: u64| {
                let offset = i128::from(k) - i128::from(q);
                low.is_none_or(|l| l <= offset) && high.is_none_or(|h| offset <= h)
            };
            assert!(queries.clone().all(|q| keys.clone().all(|k| band(q, k) == mask.allows(q, k))), "{what}");
        }
        let (queries, keys) = (Dim::new("s", n_q), Dim::new("t", n_k));
        check(&mask, &queries, &keys).unwrap_or_else(|e| panic!("{what}: {}", e.message));
    }
}

#[test]
fn pairs_between_sets_agree_with_the_dense_matrix() {
    for seed in 0..4000 {
        let mut random = Random(seed);
        let n_q = 1 + random.below(40);
        let n_k = if random.below(2) == 0 { n_q } else { 1 + random.below(40) };
        let mask = random.mask(n_q, n_k, 2);
        let mut set = |n: u64| -> Vec<Range<u64>> {
            if random.below(3) == 0 {
                return (0..random.below(4)).map(|_| random.range(n)).collect();
            }
            // Stripes, as an order deals them.
            let (len, gap) = (1 + random.below(4), random.below(6));
            let first = random.below(n);
            (0..random.below(9)).map(|i| first + i * (len + gap)).map(|p| p..p + len).collect()
        };
        let (queries, keys) = (set(n_q), set(n_k));
        let members = |set: &[Range<u64>]| -> std::collections::BTreeSet<u64> {
            set.iter().cloned().flatten().collect()
        };
        let (of_q, of_k) = (members(&queries), members(&keys));
        let dense: usize = of_q.iter().map(|&q| of_k.iter().filter(|&&k| mask.allows(q, k)).count()).sum();
        let what = format!("seed {seed}: {} on {queries:?} x {keys:?}", text(&mask));
        let (queries, keys) = (Positions::new(queries), Positions::new(keys));
        assert_eq!((queries.len(), keys.len()), (of_q.len() as u128, of_k.len() as u128), "{what}");
        assert_eq!(mask.pairs_between(&queries, &keys), dense as u128, "{what}");
    }
}

#[test]
fn stripes_of_a_long_sequence_are_counted_at_once() {
    let (parts, stripes) = (8, 1 << 16);
    let stripe = |part: u64| Positions::new((0..stripes).map(|i| i * parts + part).map(|p| p..p + 1));
    let all: Vec<Positions> = (0..parts).map(stripe).collect();
    let n = u128::from(stripes);
    for (i, queries) in all.iter().enumerate() {
        for (j, keys) in all.iter().enumerate() {
            // Stripes before the own one see one key more in every row.
            let expected = n * (n - 1) / 2 + if j <= i { n } else { 0 };
            assert_eq!(Mask::Causal.pairs_between(queries, keys), expected, "{i} {j}");
        }
    }
}

#[test]
fn forms_keep_what_they_say() {
    // Rows are queries, columns are keys.
    for (mask, rows) in [
        ("full", "####/####/####/####"),
        ("causal", "#.../##../###./####"),
        ("causal(queries=3, keys=5)", "###../####./#####"),
        ("causal(queries=4, keys=2)", "../../#./##"),
        ("window(left=1, right=0)", "#.../##../.##./..##"),
        ("window(right=1)", "##../###./####/####"),
        ("prefix(2)", "##../##../##../##.."),
        ("sinks(2)", "#.../##../##../##.."),
        ("global(1)", "####/#.../#.../#..."),
        ("chunks(3)", "###../###../###../...##/...##"),
        ("chunks(2) & causal", "#../##./..#"),
        ("documents(0, 3, 4)", "###./###./###./...#"),
        ("documents(0, 3, 4) & causal", "#.../##../###./...#"),
        ("documents(queries=[0, 1, 3], keys=[0, 2, 5])", "##.../..###/..###"),
        ("documents(queries=[0, 1, 3], keys=[0, 2, 5], causal=end)", "##.../..##./..###"),
        ("documents(queries=[0, 1, 3], keys=[0, 2, 5], causal=start)", "#..../..#../..##."),
        ("documents(queries=[0, 3, 4], keys=[0, 1, 3], causal=end)", ".../.../#../.##"),
        ("documents(queries=[0, 3, 4], keys=[0, 1, 3], causal=start)", "#../#../#../.#."),
        ("global_at(1, 3)", ".#.#/####/.#.#/####"),
        ("global_at(1, 3) & causal", "..../##../.#../####"),
        ("blocks(size=2, rows=[[1], [0]])", "..##./..##./##.../##.../....."),
        ("window(left=1, right=0) | sinks(1)", "#.../##../###./#.##"),
        ("causal | prefix(3)", "###./###./###./####"),
        ("full & prefix(1) | causal & window(left=0)", "#.../##../#.#./#..#"),
    ] {
        let parsed = read(mask).unwrap();
        let (n_q, n_k) = (rows.split('/').count() as u64, rows.find('/').unwrap() as u64);
        let cell = |q, k| if parsed.allows(q, k) { '#' } else { '.' };
        let found: Vec<String> = (0..n_q).map(|q| (0..n_k).map(|k| cell(q, k)).collect()).collect();
        assert_eq!(found.join("/"), rows, "{mask}");
    }
}

#[test]
fn text_gives_the_mask_back() {
    for seed in 0..2000 {
        let mask = Random(seed).mask(20, 20, 3);
        assert_eq!(read(&text(&mask)), Some(mask), "seed {seed}");
    }
}

#[test]
fn signs_bind_as_they_say() {
    let window = Mask::Window { left: Some(2), right: None };
    let inner = Mask::All(vec![Mask::Causal, window]);
    let outer = Mask::Any(vec![inner, Mask::Prefix(1)]);
    assert_eq!(read("causal & window(left=2) | prefix(1)").as_ref(), Some(&outer));
    assert_eq!(read("(causal & (window(left=2))) | prefix(1)").as_ref(), Some(&outer));
    assert_eq!(text(&outer), "(causal & window(left=2)) | prefix(1)");
    let documents = with_names(|names| Mask::Documents(vec![0, 7]).to_attr(names));
    assert_eq!(documents, Attr::Numbers("documents".to_owned(), vec![0, 7]));
}

#[test]
fn closed_forms_do_not_grow_with_the_sequence() {
    // StreamingLLM, a prefix model and BigBird's closed part over a tebitoken.
    let n: u64 = 1 << 40;
    let window = |left, right| Mask::Window { left: Some(left), right: Some(right) };
    let masks = [
        Mask::Any(vec![window(4095, 0), Mask::Sinks(4)]),
        Mask::Any(vec![Mask::Causal, Mask::Prefix(1 << 20)]),
        Mask::Any(vec![Mask::Global(64), window(192, 192)]),
        Mask::All(vec![Mask::Any(vec![Mask::Causal, Mask::Prefix(9)]), window(1 << 30, 1 << 30)]),
    ];
    for mask in masks {
        let strips = mask.strips(0..n, 0..n);
        assert!(strips.len() <= 8, "{} has {} strips", text(&mask), strips.len());
        let halves = mask.pairs(0..n / 2, 0..n) + mask.pairs(n / 2..n, 0..n);
        assert_eq!(mask.pairs(0..n, 0..n), halves);
    }
    let n = u128::from(n);
    assert_eq!(Mask::Causal.pairs(0..1 << 40, 0..1 << 40), n * (n + 1) / 2);
    let most = u128::from(u64::MAX);
    assert_eq!(Mask::Full.pairs(0..u64::MAX, 0..u64::MAX), most * most);
}

#[test]
fn documents_of_two_lengths_are_causal_each_by_itself() {
    let (of_q, of_k) = (vec![0, 3, 8, 9], vec![0, 5, 9, 10]);
    for align in Align::ALL {
        let mask = Mask::DocumentPairs { queries: of_q.clone(), keys: of_k.clone(), causal: Some(align) };
        let document = |i: usize| {
            let (n_q, n_k) = (of_q[i + 1] - of_q[i], of_k[i + 1] - of_k[i]);
            let alone = match align {
                Align::Start => Mask::Window { left: None, right: Some(0) },
                Align::End => Mask::CausalAtEnd { queries: n_q, keys: n_k },
            };
            alone.pairs(0..n_q, 0..n_k)
        };
        assert_eq!(mask.pairs(0..9, 0..10), (0..3).map(document).sum::<u128>(), "{align:?}");
    }
    // Where both have the same bounds, they are those of `documents`.
    let bounds = vec![0, 7, 14, 16];
    let pairs = |causal| Mask::DocumentPairs { queries: bounds.clone(), keys: bounds.clone(), causal };
    let plain = Mask::Documents(bounds.clone());
    let causal = Mask::All(vec![plain.clone(), Mask::Causal]);
    for (a, b) in
        [(pairs(None), &plain), (pairs(Some(Align::End)), &causal), (pairs(Some(Align::Start)), &causal)]
    {
        assert_eq!(a.strips(0..16, 0..16), b.strips(0..16, 0..16));
    }
}

#[test]
fn causal_between_lengths_must_say_its_alignment() {
    let (queries, keys) = (Dim::new("s", 4), Dim::new("t", 9));
    for mask in [Mask::Causal, Mask::Any(vec![Mask::Prefix(2), Mask::Causal])] {
        let message = check(&mask, &queries, &keys).unwrap_err().message;
        assert_eq!(
            message,
            "mask `causal` between the 4 tokens of `s` and the 9 of `t` does not say how they are aligned: \
             `causal(queries=4, keys=9)` aligns their ends, `window(right=0)` their starts"
        );
        assert!(check(&mask, &queries, &Dim { valid: 4, ..keys.clone() }).is_ok(), "padding is no token");
    }
}

#[test]
fn causal_documents_on_eight_ranks_need_37_key_tokens() {
    let mask = Mask::All(vec![Mask::Documents(vec![0, 7, 14, 16]), Mask::Causal]);
    let needed = |rank: u64| {
        let reach = mask.reach(2 * rank..2 * rank + 2, 0..16);
        reach.iter().map(|r| r.end - r.start).sum::<u64>()
    };
    let tokens: Vec<u64> = (0..8).map(needed).collect();
    assert_eq!(tokens, [2, 4, 6, 8, 3, 5, 7, 2]);
    assert_eq!(tokens.iter().sum::<u64>(), 37);
}

#[test]
fn aligned_documents_need_no_other_rank() {
    let mask = Mask::Documents((0..=8).map(|i| 4 * i).collect());
    for rank in 0..8 {
        let own = 4 * rank..4 * rank + 4;
        assert_eq!(mask.reach(own.clone(), 0..32), [own]);
    }
}

#[test]
fn a_window_reaches_as_many_neighbours_as_it_is_wide() {
    let (parts, tokens) = (8, 16);
    for width in 1..100_u64 {
        let mask = Mask::Window { left: Some(width - 1), right: Some(0) };
        let neighbours = (width - 1).div_ceil(tokens);
        for rank in 0..parts {
            let queries = rank * tokens..(rank + 1) * tokens;
            let sees =
                |other: &u64| mask.tile(queries.clone(), other * tokens..(other + 1) * tokens) != Tile::Empty;
            let seen: Vec<u64> = (0..parts).filter(sees).collect();
            let expected: Vec<u64> = (rank.saturating_sub(neighbours)..=rank).collect();
            assert_eq!(seen, expected, "width {width} on rank {rank}");
        }
    }
}

#[test]
fn contiguous_causal_loads_the_last_rank_the_most() {
    // Busiest over mean is (2 - 1/P) of the tokens of a rank, and half a token for the diagonal.
    for parts in [1_u64, 2, 3, 4, 8, 16] {
        for tokens in [1_u64, 7, 1 << 20] {
            let n = parts * tokens;
            let pairs = |rank: u64| Mask::Causal.pairs(rank * tokens..(rank + 1) * tokens, 0..n);
            let (busiest, total) = ((0..parts).map(pairs).max().unwrap(), Mask::Causal.pairs(0..n, 0..n));
            let ratio = busiest as f64 * parts as f64 / total as f64;
            let (p, t) = (parts as f64, tokens as f64);
            let exact = ((2.0 * p - 1.0) * t + 1.0) / (p * t + 1.0);
            assert!((ratio - exact).abs() < 1e-12, "{parts} ranks of {tokens}: {ratio}, not {exact}");
            if tokens == 1 << 20 {
                assert!((ratio - (2.0 * p - 1.0) / p).abs() < 1e-6);
            }
        }
    }
}

#[test]
fn pieces_of_zigzag_order_keep_the_same_pairs() {
    let (parts, tokens) = (8, 6);
    let n = 2 * parts * tokens;
    let chunk = |i: u64| Mask::Causal.pairs(i * tokens..(i + 1) * tokens, 0..n);
    let pairs: Vec<u128> = (0..parts).map(|rank| chunk(rank) + chunk(2 * parts - 1 - rank)).collect();
    assert!(pairs.iter().all(|&p| p == pairs[0]), "{pairs:?}");
}

#[test]
fn rows_that_see_nothing_are_empty() {
    let mask = Mask::CausalAtEnd { queries: 5, keys: 3 };
    assert_eq!(mask.runs(1, 0..3), []);
    assert_eq!(mask.runs(4, 0..3), intervals(0..3, |_| true));
    assert_eq!(mask.runs(2, 0..3), intervals(0..3, |k| k == 0));
    assert_eq!(mask.tile(0..2, 0..3), Tile::Empty);
    assert_eq!(mask.pairs(0..5, 0..3), 6);
}

#[test]
fn masks_that_make_no_sense_are_refused_and_do_not_panic() {
    let (queries, keys) = (Dim::new("s", 16), Dim::new("s", 16));
    let of = |size, rows: &[&[u64]]| Mask::Blocks { size, rows: rows.iter().map(|r| r.to_vec()).collect() };
    let pairs = |queries: &[u64], keys: &[u64]| Mask::DocumentPairs {
        queries: queries.to_vec(),
        keys: keys.to_vec(),
        causal: Some(Align::End),
    };
    let mut deep = Mask::Any(vec![Mask::Full, Mask::Full]);
    for _ in 0..9 {
        deep = Mask::All(vec![Mask::Full, deep]);
    }
    let masks = [
        Mask::Documents(vec![]),
        Mask::Documents(vec![0]),
        Mask::Documents(vec![1, 16]),
        Mask::Documents(vec![0, 9, 4, 16]),
        Mask::Documents(vec![0, 4, 4, 16]),
        Mask::Documents(vec![0, 15]),
        Mask::Prefix(0),
        Mask::Sinks(17),
        Mask::Global(u64::MAX),
        Mask::GlobalAt(vec![]),
        Mask::GlobalAt(vec![16]),
        Mask::GlobalAt(vec![3, 3]),
        Mask::GlobalAt(vec![9, u64::MAX, 2, 40]),
        pairs(&[0, 9, 4, 16], &[0, 4, 5, 16]),
        pairs(&[0, 4, 16], &[0, 4, 5, 16]),
        pairs(&[0, 4, 5, 16], &[0, 16]),
        pairs(&[0, 4, 16], &[0, 4, 15]),
        pairs(&[], &[]),
        pairs(&[0, u64::MAX], &[0, 16, 3]),
        Mask::CausalAtEnd { queries: 16, keys: 15 },
        of(0, &[&[0]]),
        of(4, &[&[1, 0]]),
        of(4, &[&[4]]),
        of(u64::MAX, &[&[1, u64::MAX]]),
        Mask::All(vec![Mask::Documents(vec![0, 9, 4, 16]), of(3, &[&[2, 1], &[1, 1]])]),
        of(8, &[&[], &[], &[]]),
        Mask::All(vec![]),
        Mask::Any(vec![Mask::Causal]),
        deep,
    ];
    for mask in masks {
        assert_eq!(check(&mask, &queries, &keys).unwrap_err().code, "V25", "{}", text(&mask));
        mask.pairs(0..u64::MAX, 0..u64::MAX);
        mask.reach(3..40, 2..50);
        mask.pairs(3..40, 2..u64::MAX);
        mask.runs(u64::MAX, 0..16);
        mask.allows(u64::MAX, u64::MAX);
    }
}
