//! Handovers between all pairs of some layouts, element by element.

use super::*;
use crate::mesh::Rank;
use crate::module::Module;
use crate::ops::Op;
use crate::ops::source::stored_runs;
use crate::text;

/// A state `c [b t h]` under a layout.
fn program(mesh: &str, order: &str, ty: &str) -> Module {
    let source = format!(
        "ithaca 1 per_rank\nmodel \"caches\"\nmesh {mesh}\ndim b = 4\ndim t = 24 {order}\ndim h = 2\n\
         dim hr = 4 copies h\n\nfunc @main() {{\n  %c = state {{name=\"c\"}} : f32[{ty}]\n  return c = %c\n}}\n"
    );
    text::parse(&source).unwrap_or_else(|refusal| panic!("{source}\n{refusal:?}"))
}

fn side(module: &Module, first: u64) -> Side<'_> {
    let function = &module.functions[module.main().unwrap()];
    let node = function.nodes.iter().find(|node| matches!(node.op, Op::State(_))).unwrap();
    let ty = function.ty(node.result());
    let processes = (first..first + module.space.mesh.ranks()).collect();
    Side {
        space: &module.space,
        states: vec![State { name: "c".to_owned(), micro_batch: None, ty, places: vec![None] }],
        processes,
    }
}

/// The stored elements that a rank has, by its own indices; none for padding.
fn part(side: &Side<'_>, rank: u64) -> (Vec<u64>, Vec<Option<u64>>) {
    let (space, ty) = (side.space, side.states[0].ty);
    let held = space.local_box(ty, Rank(rank));
    let shape: Vec<u64> = held.iter().map(|range| range.end - range.start).collect();
    let mut all = vec![Some(0)];
    for (&dim, range) in ty.dims.iter().zip(held) {
        let mut places = vec![None; (range.end - range.start) as usize];
        for run in stored_runs(space, dim, range) {
            (run.index as usize..).zip(run.positions()).for_each(|(i, position)| places[i] = Some(position));
        }
        let size = stored_size(space, dim);
        let next =
            |before: &Option<u64>| places.iter().map(|p| Some((*before)? * size + (*p)?)).collect::<Vec<_>>();
        all = all.iter().flat_map(next).collect();
    }
    (shape, all)
}

#[test]
fn every_rank_receives_its_part_once() {
    let layouts = [
        ("one=1", "", "b t h"),
        ("tp=2", "", "b t h@tp"),
        ("tp=4", "", "b t hr@tp"),
        ("dp=2,tp=4", "", "b@dp t hr@tp"),
        ("dp=4", "", "b@dp t h"),
        ("cp=4", "order striped(4, 2)", "b t@cp h"),
        ("cp=3", "order striped(3, 4)", "b t@cp h"),
        ("cp=2,tp=2", "order zigzag(2)", "b t@cp h@tp"),
        ("a=2,b=3", "", "b t@(a,b) h"),
        ("x=5", "", "b t h"),
    ];
    for (mesh, order, ty) in layouts {
        for (other_mesh, other_order, other_ty) in layouts {
            let [left, right] = [program(mesh, order, ty), program(other_mesh, other_order, other_ty)];
            let from = side(&left, 0);
            let to = side(&right, from.processes.len() as u64);
            let handover = Handover::between(&from, &to).unwrap();
            let label = format!("{mesh} {ty} to {other_mesh} {other_ty}");
            let [of_state] = handover.rounds[0].as_slice() else { panic!("{label}") };
            let mut received: Vec<Vec<Option<u64>>> = to
                .processes
                .iter()
                .enumerate()
                .map(|(r, _)| vec![None; part(&to, r as u64).1.len()])
                .collect();
            for one in &handover.moves[of_state.moves] {
                let ((shape, sent), (own_shape, _)) = (part(&from, one.from.0), part(&to, one.to.0));
                let copies = one.copies([&shape, &own_shape]);
                assert_eq!(copies.iter().map(|c| c.len).sum::<u64>(), one.elements(), "{label}");
                for (from, to) in copies.iter().flat_map(|c| (c.from..c.from + c.len).zip(c.to..)) {
                    let place = &mut received[one.to.0 as usize][to as usize];
                    assert_eq!(*place, None, "{label}: twice");
                    *place = sent[from as usize];
                }
            }
            for (rank, received) in received.into_iter().enumerate() {
                assert_eq!(received, part(&to, rank as u64).1, "{label}, rank {rank}");
            }
            // No rank sends more than its even share of copies asks.
            let bytes: u64 = handover.bytes().values().sum();
            assert_eq!(
                bytes,
                to.processes
                    .iter()
                    .enumerate()
                    .map(|(r, _)| part(&to, r as u64).1.len() as u64 * 4)
                    .sum::<u64>()
            );
        }
    }
}

#[test]
fn what_stays_is_not_moved() {
    let [heads, tokens] = [program("tp=2", "", "b t h@tp"), program("cp=2", "", "b t@cp h")];
    let same = Handover::between(&side(&heads, 0), &side(&heads, 0)).unwrap();
    assert_eq!((same.rounds[0].len(), same.bytes().len()), (0, 0));
    // Half of what a rank reads is there.
    let moved = Handover::between(&side(&heads, 0), &side(&tokens, 0)).unwrap();
    assert_eq!(moved.bytes(), BTreeMap::from([((0, 1), 4 * 12 * 4), ((1, 0), 4 * 12 * 4)]));
}

/// Copies share the work: eight ranks have all, and two read all.
#[test]
fn copies_send_alike() {
    let [from, to] = [program("x=8", "", "b t h"), program("dp=4", "", "b@dp t h")];
    let bytes = Handover::between(&side(&from, 0), &side(&to, 8)).unwrap().bytes();
    assert_eq!(bytes.keys().map(|(from, _)| from).collect::<Vec<_>>(), [&0, &1, &2, &3]);
}

/// Two sequences of prompts at once, four of tokens: the second round has the last two.
#[test]
fn further_sequences_come_in_rounds() {
    let [mut from, to] = [program("tp=2", "", "b t h@tp"), program("dp=2", "", "b@dp t h")];
    let batch = from.space.dims.ids().next().unwrap();
    (from.space.dims[batch].size, from.space.dims[batch].valid) = (2, 2);
    let handover = Handover::between(&side(&from, 0), &side(&to, 2)).unwrap();
    let receivers = handover.rounds.iter().map(|round| {
        let moves = &handover.moves[round[0].moves];
        moves.iter().map(|one| (one.to.0, one.elements())).collect::<Vec<_>>()
    });
    assert_eq!(receivers.collect::<Vec<_>>(), [vec![(0, 48), (0, 48)], vec![(1, 48), (1, 48)]]);
    let second = &handover.moves[handover.rounds[1][0].moves][0];
    assert_eq!((second.pieces[0][0].first.from, second.pieces[0][0].first.to), (0, 0));
}

#[test]
fn states_that_differ_are_refused() {
    let [from, mut to] = [program("x=2", "", "b t h"), program("x=2", "", "b t h")];
    let dim = to.space.dims.ids().nth(1).unwrap();
    (to.space.dims[dim].size, to.space.dims[dim].valid) = (32, 32);
    let refusal = Handover::between(&side(&from, 0), &side(&to, 0)).unwrap_err();
    assert_eq!(refusal, "`c` is f32 [4, 24, 2] where it is written, and f32 [4, 32, 2] where it is read");
}
