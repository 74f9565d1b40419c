//! Handovers of states from one schedule to another, and their execution in memory.

use std::collections::BTreeMap;

use ithaca_ir::handover::{self, Handover, MicroBatch, Side, State};
use ithaca_ir::ops::{Binding, Target, source};
use ithaca_ir::schedule::Schedule;
use ithaca_ir::{Rank, Space, TensorType};

use crate::error::RunError;
use crate::persistent::{self, PersistentTensor};
use crate::positions;
use crate::source::{cut, load_state};
use crate::store::TensorSource;
use crate::tensor::{Outputs, Tensor, index, whole, write_part};

/// The handover from one schedule to another. Both run on the same processes, numbered so that nothing moves if that can be; or
/// on two pools, as where they have not equally many ranks: the ranks of the first, and after them those of the second.
///
/// # Errors
/// [`RunError::Invalid`] for a state that the first does not leave as the second reads it.
pub fn between(schedules: [&Schedule; 2], two_pools: bool) -> Result<Handover, RunError> {
    let [left, read] = schedules.map(states);
    let [senders, receivers] = schedules.map(|schedule| schedule.space.mesh.ranks());
    let two_pools = two_pools || senders != receivers;
    let first = if two_pools { senders } else { 0 };
    let mut from = side(schedules[0], &left?, (0..senders).collect())?;
    let to = side(schedules[1], &read?, (first..first + receivers).collect())?;
    if let (false, Some(places)) = (two_pools, handover::places(&from, &to)) {
        from.processes = places;
    }
    Handover::between(&from, &to).map_err(RunError::invalid)
}

/// The states of a schedule that last.
fn states(schedule: &Schedule) -> Result<Vec<PersistentTensor<'_>>, RunError> {
    let mut states = persistent::tensors(schedule)?;
    states.retain(|tensor| tensor.target == Target::State && !tensor.is_gradient());
    Ok(states)
}

fn side<'a>(
    schedule: &'a Schedule,
    states: &[PersistentTensor<'a>],
    processes: Vec<u64>,
) -> Result<Side<'a>, RunError> {
    let state = |tensor: &PersistentTensor<'a>| {
        Ok::<_, RunError>(State {
            name: tensor.stored_name(),
            micro_batch: micro_batch(tensor.binding)?,
            ty: tensor.ty,
            places: tensor.places.clone(),
        })
    };
    let states = states.iter().map(state).collect::<Result<_, _>>()?;
    Ok(Side { space: &schedule.space, states, processes })
}

/// The micro-batch whose sequences a binding has: the index along the second dimension of its view.
fn micro_batch(binding: &Binding) -> Result<Option<MicroBatch>, RunError> {
    let Binding { name, view, window, .. } = binding;
    if window.is_empty() {
        return Ok(None);
    }
    let is_whole = |i: usize| i == 1 || window.get(i) == Some(&(0..view[i]));
    match (view.get(1), window.get(1)) {
        (Some(&of), Some(index)) if index.end == index.start + 1 && (0..view.len()).all(is_whole) => {
            Ok(Some(MicroBatch { index: index.start, of }))
        }
        _ => Err(RunError::invalid(format!("`{name}` is a window of a state that is no micro-batch"))),
    }
}

/// Moves the states `left` by a schedule to the ranks of another, each message through a buffer of its own; returns the
/// states of these, as stored.
///
/// # Errors
/// [`RunError::Invalid`] where other bytes were sent than planned; [`RunError::Store`].
pub fn execute(
    handover: &Handover,
    schedules: [&Schedule; 2],
    left: &dyn TensorSource,
) -> Result<Outputs<f32>, RunError> {
    let [written, read] = [states(schedules[0])?, states(schedules[1])?];
    let (mut received, mut sent) = (Outputs::new(), BTreeMap::<(u64, u64), u64>::new());
    let mut parts: [BTreeMap<(&str, Option<MicroBatch>), Parts<'_>>; 2] = Default::default();
    for state in handover.rounds.iter().flatten() {
        for (side, states) in [(0, &written), (1, &read)] {
            let key = (state.name.as_str(), state.micro_batches[side]);
            if !parts[side].contains_key(&key) {
                // An element that no message brings is seen.
                let own = Parts::of(schedules[side], states, key, left, side == 1)?;
                parts[side].insert(key, own);
            }
        }
        let [from, to] = &mut parts;
        let from = &from[&(state.name.as_str(), state.micro_batches[0])];
        let to = to.get_mut(&(state.name.as_str(), state.micro_batches[1]));
        let nothing = || RunError::invalid(format!("a rank has nothing of `{}`", state.name));
        let to = to.ok_or_else(nothing)?;
        for one in &handover.moves[state.moves] {
            let (_, source) = from.of.get(&one.from).ok_or_else(nothing)?;
            let (_, target) = to.of.get_mut(&one.to).ok_or_else(nothing)?;
            let shapes =
                [&source.shape, &target.shape].map(|shape| Vec::from_iter(shape.iter().map(|&n| n as u64)));
            let copies = one.copies([&shapes[0], &shapes[1]]);
            let message: Vec<f32> = copies
                .iter()
                .flat_map(|c| &source.data[index(c.from)..index(c.from + c.len)])
                .copied()
                .collect();
            let mut rest = message.as_slice();
            for copy in &copies {
                let (piece, after) = rest.split_at(index(copy.len));
                target.data[index(copy.to)..index(copy.to + copy.len)].copy_from_slice(piece);
                rest = after;
            }
            let [from, to] =
                [(0, one.from), (1, one.to)].map(|(i, rank)| handover.processes[i][index(rank.0)]);
            if from != to {
                *sent.entry((from, to)).or_default() += message.len() as u64 * state.ty.dtype.bytes();
            }
        }
    }
    parts[1].values().for_each(|own| own.store(&mut received));
    if sent != handover.bytes() {
        return Err(RunError::invalid("messages of a handover have other sizes than planned"));
    }
    Ok(received)
}

/// The parts that ranks have of a state.
struct Parts<'a> {
    space: &'a Space,
    /// The name of the stored tensor, and where these are in it.
    stored_name: String,
    binding: &'a Binding,
    stored: Vec<u64>,
    /// Each with its type.
    of: BTreeMap<Rank, (&'a TensorType, Tensor<f32>)>,
}

impl<'a> Parts<'a> {
    /// Those of the stored state `name`, or of a micro-batch of it; NaN for its elements where they are `unknown`.
    fn of(
        schedule: &'a Schedule,
        states: &[PersistentTensor<'a>],
        (name, of): (&str, Option<MicroBatch>),
        stored: &dyn TensorSource,
        unknown: bool,
    ) -> Result<Self, RunError> {
        let space = &schedule.space;
        let mut all: Option<Self> = None;
        for tensor in states.iter().filter(|tensor| tensor.stored_name() == name) {
            if micro_batch(tensor.binding)? != of {
                continue;
            }
            let mut stored_state = load_state(space, tensor.binding, tensor.ty, tensor.layer, stored)?;
            if unknown {
                stored_state.data.fill(f64::NAN);
            }
            let shape = tensor.binding.stored_shape(space, tensor.ty);
            let all = all.get_or_insert_with(|| Self {
                space,
                stored_name: tensor.stored_name(),
                binding: tensor.binding,
                stored: shape,
                of: BTreeMap::new(),
            });
            for rank in space.mesh.iter_ranks().filter(|&rank| tensor.is_on(space, rank)) {
                let held = space.local_box(tensor.ty, rank);
                let part = || {
                    (tensor.ty, cut(space, tensor.ty, &held, (tensor.binding, &stored_state), |x| x as f32))
                };
                all.of.entry(rank).or_insert_with(part);
            }
        }
        all.ok_or_else(|| RunError::invalid(format!("no step has `{name}`")))
    }

    /// Writes them into the stored tensor.
    fn store(&self, received: &mut Outputs<f32>) {
        let Self { space, stored_name, binding, stored, of } = self;
        let sizes = |ty: &TensorType| ty.dims.iter().map(|&d| index(source::stored_size(space, d))).collect();
        let Some((ty, _)) = of.values().next() else { return };
        let mut own = Tensor::filled(sizes(ty), f32::NAN);
        for (&rank, (ty, part)) in of {
            let along = ty.dims.iter().zip(space.local_box(ty, rank));
            let along = along.map(|(&d, range)| positions::loaded_from(space, d, range));
            positions::each_place(along.collect(), &own.shape, |n, place| {
                if let Some(i) = place {
                    own.data[i] = part.data[n];
                }
            });
        }
        let seen = whole(if binding.view.is_empty() { stored } else { &binding.view });
        let window = if binding.window.is_empty() { &seen } else { &binding.window };
        let shape = stored.iter().map(|&n| index(n)).collect();
        let all = received.entry(stored_name.clone()).or_insert_with(|| Tensor::filled(shape, f32::NAN));
        write_part(&seen, &mut all.data, window, &own.data);
    }
}
