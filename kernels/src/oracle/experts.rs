//! Mixtures of experts: `route`, `dispatch`, `combine` and their gradients.
//!
//! Tokens and slots are rows. `deal` gives each choice its place; the other operations read places.

use std::ops::Range;

use ithaca_ir::Space;
use ithaca_ir::boxes::Region;
use ithaca_ir::ops::experts::{Deal, Experts, Gates, Route, SHARE_EPS, Scoring, Shared, Slots};

use super::rows::softmax_of;
use super::value::{LocalOp, Operand, Value};
use crate::error::RunError;
use crate::real::{Real, sum};
use crate::tensor::{index, length};

/// Computes `op` on the parts of a rank.
///
/// # Errors
/// [`RunError::Experts`] where tokens exceed a bound; [`RunError::Invalid`] for operands that do not fit, which a verified
/// program does not have.
pub(super) fn experts<T: Real>(call: &LocalOp<'_, T>, op: &Experts) -> Result<Vec<Value<T>>, RunError> {
    // The gates, the third operand, where there are any.
    let gates = || call.operands.get(2).map(Operand::real).transpose();
    let first = |region: &Region| region.first().cloned().unwrap_or_default();
    let data = match op {
        Experts::Route(r) => {
            let bias = call.operands.get(1).map(Operand::real).transpose()?;
            let (gates, choices) = route(call.space, r, call.real(0)?, bias)?;
            return Ok(vec![Value::Real(call.tensor(0, gates)?), Value::Int(call.tensor(1, choices)?)]);
        }
        Experts::RouteBackward(r) => {
            route_backward(call.space, r, call.real(0)?, call.int(1)?, call.real(2)?)?
        }
        Experts::Deal(op) => {
            let places = deal(call, op)?;
            return Ok(vec![Value::Int(call.tensor(0, places)?)]);
        }
        Experts::Dispatch(slots) => {
            Slotted::of(call, slots, first(&call.result().region))?.dispatch(call.real(1)?, gates()?)?
        }
        Experts::Combine(slots) => {
            Slotted::of(call, slots, first(&call.operands[1].region))?.combine(call.real(1)?, gates()?)?
        }
        Experts::Products(slots) => Slotted::of(call, slots, first(&call.operands[1].region))?
            .products(call.real(1)?, call.real(2)?)?,
    };
    Ok(vec![Value::Real(call.tensor(0, data)?)])
}

/// The places of choices.
///
/// # Errors
/// [`RunError::Experts`] where a bound is exceeded.
fn deal<T: Real>(call: &LocalOp<'_, T>, deal: &Deal) -> Result<Vec<i32>, RunError> {
    let (space, choices) = (call.space, call.int(0)?);
    let top = call.operands[0].shape().last().copied().unwrap_or(0);
    let of_experts = [space.size(deal.experts), space.size(deal.shared.slots)];
    let groups = groups(call, &deal.shared)?;
    let (places, most) = Deal::places(choices, top, of_experts, groups);
    if deal.bound.is_some() && most[0] > of_experts[1] {
        return Err(RunError::Experts(deal.overflow(space, most)));
    }
    Ok(places)
}

/// The number of groups that a rank has, and the group of each of its tokens.
fn groups<T: Real>(
    call: &LocalOp<'_, T>,
    shared: &Shared,
) -> Result<(u64, impl Fn(u64) -> u64 + use<T>), RunError> {
    let uneven = || RunError::invalid("tokens are no whole groups");
    let each = shared.tokens(call.space).ok_or_else(uneven)?;
    let [sequences, tokens, _] = call.operands[0].shape()[..] else { return Err(uneven()) };
    let held = [sequences as u64, tokens as u64];
    if held.iter().zip(each).any(|(held, each)| each == 0 || held % each != 0) {
        return Err(uneven());
    }
    Ok(Shared::group_of(held, each))
}

/// For each choice of each token, the slot at an expert that the rank holds.
struct Slotted {
    /// Rows of slots, counted over experts held, groups and slots; `None` where the token has no slot, or the expert is held
    /// by another rank.
    rows: Vec<Option<usize>>,
    /// Choices of a token.
    top: usize,
    /// All rows of slots.
    n_rows: usize,
}

impl Slotted {
    /// The rows of the places in the first operand, where the rank has the experts `held`.
    fn of<T: Real>(call: &LocalOp<'_, T>, slots: &Slots, held: Range<u64>) -> Result<Self, RunError> {
        let places = call.int(0)?;
        let top = call.operands[0].shape().last().copied().unwrap_or(0).max(1);
        let each = call.space.size(slots.shared.slots).max(1);
        let (groups, group) = groups(call, &slots.shared)?;
        let row = |(i, &place): (usize, &i32)| {
            let place = u64::try_from(place).ok()?;
            let expert = Some(place / each).filter(|e| held.contains(e))?;
            Some(index(((expert - held.start) * groups + group((i / top) as u64)) * each + place % each))
        };
        let rows = places.iter().enumerate().map(row).collect();
        Ok(Self { rows, top, n_rows: length(&held) * index(groups * each) })
    }

    fn tokens(&self) -> usize {
        self.rows.len() / self.top
    }

    /// Elements of a row of `n` rows together `elements` long.
    fn width(elements: usize, n: usize) -> Result<usize, RunError> {
        match n {
            0 if elements == 0 => Ok(0),
            n if n > 0 && elements.is_multiple_of(n) => Ok(elements / n),
            _ => Err(RunError::invalid("tokens and slots are rows of one width")),
        }
    }

    fn dispatch<T: Real>(&self, x: &[T], gates: Option<&[T]>) -> Result<Vec<T>, RunError> {
        let width = Self::width(x.len(), self.tokens())?;
        let mut out = vec![T::ZERO; self.n_rows * width];
        for (i, row) in self.rows.iter().enumerate() {
            let Some(row) = row else { continue };
            let token = &x[i / self.top * width..][..width];
            for (to, &x) in out[row * width..][..width].iter_mut().zip(token) {
                *to += gates.map_or(x, |g| x * g[i]);
            }
        }
        Ok(out)
    }

    fn combine<T: Real>(&self, y: &[T], gates: Option<&[T]>) -> Result<Vec<T>, RunError> {
        let width = Self::width(y.len(), self.n_rows)?;
        let mut out = vec![T::ZERO; self.tokens() * width];
        for (i, row) in self.rows.iter().enumerate() {
            let Some(row) = row else { continue };
            let slot = &y[row * width..][..width];
            for (sum, &y) in out[i / self.top * width..][..width].iter_mut().zip(slot) {
                *sum += gates.map_or(y, |g| y * g[i]);
            }
        }
        Ok(out)
    }

    fn products<T: Real>(&self, y: &[T], x: &[T]) -> Result<Vec<T>, RunError> {
        let width = Self::width(x.len(), self.tokens())?;
        if y.len() != self.n_rows * width {
            return Err(RunError::invalid("tokens and slots are rows of one width"));
        }
        let product = |(i, row): (usize, &Option<usize>)| {
            let Some(row) = row else { return T::ZERO };
            let (x, y) = (&x[i / self.top * width..][..width], &y[row * width..][..width]);
            sum(x.iter().zip(y).map(|(&a, &b)| a * b))
        };
        Ok(self.rows.iter().enumerate().map(product).collect())
    }
}

/// Gates and choices of every token.
fn route<T: Real>(
    space: &Space,
    route: &Route,
    logits: &[T],
    bias: Option<&[T]>,
) -> Result<(Vec<T>, Vec<i32>), RunError> {
    let (n, top) = (index(space.size(route.over)), index(space.size(route.top)));
    if n == 0 || !logits.len().is_multiple_of(n) || bias.is_some_and(|b| b.len() != n) {
        return Err(RunError::invalid("`route` on a part of the experts"));
    }
    let rows = logits.len() / n;
    let (mut gates, mut choices) = (Vec::with_capacity(rows * top), Vec::with_capacity(rows * top));
    for row in logits.chunks(n) {
        let scores = scores(route.scoring, row);
        let worth: Vec<T> = match bias {
            None => scores.clone(),
            Some(bias) => scores.iter().zip(bias).map(|(&s, &b)| s + b).collect(),
        };
        let chosen = best(&worth, &allowed(route, &worth), top);
        let share = share_of(route, &chosen, &scores);
        let scale = T::from_f64(route.scale);
        gates.extend(chosen.iter().map(|&i| scores[i] / share * scale));
        choices.extend(chosen.iter().map(|&i| i32::try_from(i).unwrap_or(i32::MAX)));
    }
    Ok((gates, choices))
}

/// The gradient of the logits, the choice being fixed.
fn route_backward<T: Real>(
    space: &Space,
    route: &Route,
    logits: &[T],
    choices: &[i32],
    d_gates: &[T],
) -> Result<Vec<T>, RunError> {
    let (n, top) = (index(space.size(route.over)), index(space.size(route.top)));
    let rows = logits.len() / n.max(1);
    if n == 0 || logits.len() != rows * n || choices.len() != rows * top || d_gates.len() != rows * top {
        return Err(RunError::invalid("`route_backward` on a part of the experts"));
    }
    let scale = T::from_f64(route.scale);
    let mut out = Vec::with_capacity(logits.len());
    for (row, logits) in logits.chunks(n).enumerate() {
        let scores = scores(route.scoring, logits);
        let known = |&choice: &i32| usize::try_from(choice).ok().filter(|&i| i < n);
        let chosen: Vec<usize> = choices[row * top..][..top].iter().filter_map(known).collect();
        if chosen.len() != top {
            return Err(RunError::invalid("`route_backward` has a choice that is no expert"));
        }
        let d = &d_gates[row * top..][..top];
        let share = share_of(route, &chosen, &scores);
        // The sum of the contributions of all gates.
        let taken = match route.gates {
            Gates::Shares => sum(chosen.iter().zip(d).map(|(&i, &d)| d * scores[i] / share)),
            Gates::Scores => T::ZERO,
        };
        let mut d_scores = vec![T::ZERO; n];
        for (&i, &d) in chosen.iter().zip(d) {
            d_scores[i] += (d - taken) / share * scale;
        }
        let both = || d_scores.iter().zip(&scores);
        match route.scoring {
            Scoring::Sigmoid => out.extend(both().map(|(&d, &s)| d * s * (T::ONE - s))),
            Scoring::Softmax => {
                let mean = sum(both().map(|(&d, &s)| d * s));
                out.extend(both().map(|(&d, &s)| (d - mean) * s));
            }
        }
    }
    Ok(out)
}

fn scores<T: Real>(scoring: Scoring, logits: &[T]) -> Vec<T> {
    match scoring {
        Scoring::Sigmoid => logits.iter().map(|x| x.through(|x| 1.0 / (1.0 + (-x).exp()))).collect(),
        Scoring::Softmax => softmax_of(logits.iter().copied()).0,
    }
}

/// The divisor that turns scores into gates.
fn share_of<T: Real>(route: &Route, chosen: &[usize], scores: &[T]) -> T {
    match route.gates {
        Gates::Scores => T::ONE,
        Gates::Shares => sum(chosen.iter().map(|&i| scores[i])) + T::from_f64(SHARE_EPS),
    }
}

/// Which experts may be chosen: those of the best groups.
fn allowed<T: Real>(route: &Route, worth: &[T]) -> Vec<bool> {
    let Some(groups) = route.groups else { return vec![true; worth.len()] };
    let size = (worth.len() / index(groups.count).max(1)).max(1);
    let two_best = |group: &[T]| sum(best(group, &vec![true; group.len()], 2).into_iter().map(|i| group[i]));
    let values: Vec<T> = worth.chunks(size).map(two_best).collect();
    let kept = best(&values, &vec![true; values.len()], index(groups.kept));
    (0..worth.len()).map(|i| kept.contains(&(i / size))).collect()
}

/// The indices of the `n` largest values among those allowed, in descending order; the first of equal ones comes first.
fn best<T: Real>(values: &[T], allowed: &[bool], n: usize) -> Vec<usize> {
    let mut chosen: Vec<usize> = Vec::with_capacity(n);
    for _ in 0..n.min(values.len()) {
        let free = (0..values.len()).filter(|&i| allowed[i] && !chosen.contains(&i));
        let Some(next) = free.reduce(|best, i| if values[i] > values[best] { i } else { best }) else {
            break;
        };
        chosen.push(next);
    }
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_chosen_by_their_two_best() {
        let dim = |n: u64, space: &mut Space| space.dims.push(ithaca_ir::Dim::new(format!("d{n}"), n));
        let mut space = Space::default();
        let (over, top) = (dim(6, &mut space), dim(2, &mut space));
        let groups = Some(ithaca_ir::ops::experts::ExpertGroups { count: 3, kept: 1 });
        let r = Route { over, top, scoring: Scoring::Sigmoid, gates: Gates::Shares, scale: 2.0, groups };
        // The best expert of all is alone in its group.
        let logits = [3.0, -9.0, 2.0, 1.5, 0.0, 0.1];
        let (gates, choices) = route::<f64>(&space, &r, &logits, None).unwrap();
        assert_eq!(choices, [2, 3]);
        assert!((gates.iter().sum::<f64>() - 2.0).abs() < 1e-12);
        let bias = [0.0, 5.0, 0.0, 0.0, 0.0, 0.0];
        let (biased, choices) = route::<f64>(&space, &r, &logits, Some(&bias)).unwrap();
        assert_eq!(choices, [1, 0], "the bias takes part in the choice");
        assert!(biased[0] < 1e-3, "and not in the gate");
    }
}
