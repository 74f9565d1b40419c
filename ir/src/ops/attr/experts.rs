//! Attributes of experts, and of parts of dimensions.

use super::{Attr, AttrError, Attrs, Names};
use crate::dim::DimId;
use crate::ops::Op;
use crate::ops::experts::{Capacity, ExpertGroups, Experts, Gates, Route, Scoring, Slots};
use crate::ops::window::Window;

fn dim(names: Names<'_>, d: DimId) -> Attr {
    Attr::Word(names.space.dims[d].name.clone())
}

pub(super) fn experts_attrs(experts: &Experts, names: Names<'_>) -> Vec<(&'static str, Attr)> {
    match experts {
        Experts::Route(route) | Experts::RouteBackward(route) => {
            let mut attrs = vec![
                ("over", dim(names, route.over)),
                ("top", dim(names, route.top)),
                ("scoring", Attr::Word(route.scoring.name().to_owned())),
                ("gates", Attr::Word(route.gates.name().to_owned())),
            ];
            if route.scale != 1.0 {
                attrs.push(("scale", Attr::Float(route.scale)));
            }
            attrs.extend(
                route.groups.map(|g| ("groups", Attr::Numbers("best".to_owned(), vec![g.kept, g.count]))),
            );
            attrs
        }
        Experts::Dispatch(slots) | Experts::Combine(slots) | Experts::Products(slots) => {
            let mut attrs = vec![("experts", dim(names, slots.experts)), ("top", dim(names, slots.top))];
            if let Some(c) = slots.capacity {
                let named = [("sequence", c.sequence), ("groups", c.groups), ("slots", c.slots)];
                let args = named.map(|(key, d)| (key.to_owned(), dim(names, d))).to_vec();
                attrs.push(("capacity", Attr::Call("dealt".to_owned(), args)));
            }
            attrs
        }
    }
}

pub(super) fn window_attrs(window: &Window, names: Names<'_>) -> Vec<(&'static str, Attr)> {
    match window {
        Window::Concat { over } => vec![("over", dim(names, *over))],
        Window::Cut { to, start } => vec![("to", dim(names, *to)), ("start", Attr::Int(*start))],
    }
}

/// The operation called `name`, if it is one of these.
pub(super) fn read(name: &str, attrs: &mut Attrs, names: Names<'_>) -> Result<Option<Op>, AttrError> {
    Ok(Some(match name {
        "route" => Op::Experts(Experts::Route(read_route(attrs, names)?)),
        "route_backward" => Op::Experts(Experts::RouteBackward(read_route(attrs, names)?)),
        "dispatch" => Op::Experts(Experts::Dispatch(read_slots(attrs, names)?)),
        "combine" => Op::Experts(Experts::Combine(read_slots(attrs, names)?)),
        "slot_products" => Op::Experts(Experts::Products(read_slots(attrs, names)?)),
        "concat" => Op::Window(Window::Concat { over: attrs.dim("over", names)? }),
        "cut" => Op::Window(Window::Cut { to: attrs.dim("to", names)?, start: attrs.int("start")? }),
        _ => return Ok(None),
    }))
}

fn read_route(attrs: &mut Attrs, names: Names<'_>) -> Result<Route, AttrError> {
    let (over, top) = (attrs.dim("over", names)?, attrs.dim("top", names)?);
    let word = attrs.word("scoring")?;
    let scoring = Scoring::ALL.into_iter().find(|s| s.name() == word);
    let scoring = scoring.ok_or_else(|| attrs.wrong("scoring", "softmax or sigmoid", &Attr::Word(word)))?;
    let word = attrs.word("gates")?;
    let gates = Gates::ALL.into_iter().find(|g| g.name() == word);
    let gates = gates.ok_or_else(|| attrs.wrong("gates", "scores or shares", &Attr::Word(word)))?;
    let groups = match attrs.optional("groups") {
        None => None,
        Some(Attr::Numbers(name, numbers)) if name == "best" && numbers.len() == 2 => {
            Some(ExpertGroups { kept: numbers[0], count: numbers[1] })
        }
        Some(other) => return Err(attrs.wrong("groups", "best(KEPT, COUNT)", &other)),
    };
    let scale = attrs.optional_float("scale")?.unwrap_or(1.0);
    Ok(Route { over, top, scoring, gates, scale, groups })
}

fn read_slots(attrs: &mut Attrs, names: Names<'_>) -> Result<Slots, AttrError> {
    let (experts, top) = (attrs.dim("experts", names)?, attrs.dim("top", names)?);
    let capacity = match attrs.optional("capacity") {
        None => None,
        Some(Attr::Call(name, args)) if name == "dealt" => {
            let mut args = Attrs::new("dealt", args);
            let capacity = Capacity {
                sequence: args.dim("sequence", names)?,
                groups: args.dim("groups", names)?,
                slots: args.dim("slots", names)?,
            };
            args.finish()?;
            Some(capacity)
        }
        Some(other) => {
            return Err(attrs.wrong("capacity", "dealt(sequence=…, groups=…, slots=…)", &other));
        }
    };
    Ok(Slots { experts, top, capacity })
}
