//! Every mutant of the corpus is caught, or proven harmless the long way; and the corpus itself raises no alarm.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ithaca_ir::schedule::{self, Content, Schedule, Work};
use ithaca_ir::{Diagnostic, verify};

use super::corpus::{Case, corpus};
use super::facts::difference;
use super::mutators::{MUTATORS, Mutant, Odd, drop_on_one_rank, drop_on_one_stage, swap, swap_on_one_rank};
use super::order::{facts, wires_fit};
use crate::fuzz::Choices;
use crate::tier;

/// What the checks say of a schedule that should do what a program says.
pub(super) fn judge(mutant: &Schedule, case: &Case) -> Option<Diagnostic> {
    let program = verify::verify(&case.per_rank).unwrap();
    let said = schedule::verify(mutant).and_then(|_| schedule::verify_meaning(mutant, program));
    said.err().map(|diagnostics| diagnostics[0].clone())
}

/// Mutants of each kind and schedule.
fn rounds() -> Range<u64> {
    tier::draws(1, 2)
}

/// What may leave nobody at the other end: the task is gone, no task touches the buffer, or a whole call is another.
const LONELY: [&str; 11] = [
    "drop a task",
    "drop a pack",
    "drop an unpack",
    "read another buffer",
    "write another buffer",
    "retarget an assignment",
    "move the frame of a callee",
    "pack or unpack another tensor",
    "change the layers of a call",
    "change the stride of a call",
    "change the order of a scan",
];

/// Tasks that a message names.
fn tasks_named(message: &str) -> usize {
    message.matches("task ").count()
}

#[test]
fn nothing_of_the_corpus_alarms() {
    let all = corpus();
    assert!(all.len() > 50, "only {} cases", all.len());
    for case in &all {
        let found = judge(&case.schedule, case);
        assert!(found.is_none(), "{}: {found:?}", case.title);
        for (id, frame) in case.schedule.frames.iter() {
            let numbers: Vec<usize> = (0..frame.tasks.len()).collect();
            let known = facts(&case.schedule, id, &numbers);
            assert!(known.is_ok(), "{}, `@{}`: {known:?}", case.title, frame.name);
        }
        assert!(wires_fit(&case.schedule), "{}", case.title);
    }
}

/// Whether a mutant that the checks accept does the same as before, in the same order where that matters.
pub(super) fn is_harmless(case: &Case, mutant: &Mutant) -> Result<(), String> {
    let frame = &case.schedule.frames[mutant.frame];
    let numbers: Vec<usize> = (0..frame.tasks.len()).collect();
    let before = facts(&case.schedule, mutant.frame, &numbers)?;
    let after = facts(&mutant.schedule, mutant.frame, &mutant.before)?;
    if before != after
        && let Some(what) = difference(&before, &after)
    {
        return Err(what);
    }
    if mutant.schedule.frames[mutant.frame].bytes < frame.bytes {
        for (id, other) in mutant.schedule.frames.iter() {
            facts(&mutant.schedule, id, &(0..other.tasks.len()).collect::<Vec<_>>())?;
        }
    }
    if wires_fit(&mutant.schedule) { Ok(()) } else { Err("a wire is too short".to_owned()) }
}

/// The lines that a mutant has in place of others.
fn changed(before: &Schedule, after: &Schedule) -> String {
    let [before, after] = [before, after].map(schedule::print);
    let only = |sign: &str, text: &str, other: &str| -> Vec<String> {
        let known: BTreeSet<&str> = other.lines().collect();
        text.lines().filter(|line| !known.contains(line)).map(|line| format!("{sign} {line}")).collect()
    };
    [only("-", &before, &after), only("+", &after, &before)].concat().join("\n")
}

#[test]
fn every_mutant_is_caught_or_harmless() {
    let mut counts: BTreeMap<&str, [usize; 2]> = BTreeMap::new();
    let mut wrong = Vec::new();
    for (c, case) in corpus().iter().enumerate() {
        for (m, (name, mutate)) in MUTATORS.iter().enumerate() {
            for round in rounds() {
                let mut choices = Choices::from_seed(round << 32 | (c as u64) << 8 | m as u64);
                let Some(mutant) = mutate(&case.schedule, &mut choices) else { continue };
                if mutant.schedule == case.schedule {
                    continue;
                }
                let count = counts.entry(name).or_default();
                match judge(&mutant.schedule, case) {
                    Some(Diagnostic { message, .. }) => {
                        count[0] += 1;
                        // What a frame returns, what lasts, and what nobody needs is read by no task; what a collective
                        // cannot do to its operand concerns no other.
                        let returned = [
                            "on return",
                            "the frame returns",
                            "output ",
                            "no task",
                            "holds another value",
                            "a collective is on the stream",
                            "is not a partial sum over",
                            "the collective needs",
                        ];
                        let returned = usize::from(returned.iter().any(|said| message.contains(said)));
                        if !LONELY.contains(name) && tasks_named(&message) + returned < 2 {
                            wrong.push(format!("{}, {name}: names one task: {message}", case.title));
                        }
                    }
                    None => match is_harmless(case, &mutant) {
                        Ok(()) => count[1] += 1,
                        Err(why) => {
                            let frame = &mutant.schedule.frames[mutant.frame].name;
                            let changed = changed(&case.schedule, &mutant.schedule);
                            wrong.push(format!(
                                "{}, {name}, round {round}, `@{frame}`: {why}\n{changed}",
                                case.title
                            ));
                        }
                    },
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}\n{counts:#?}", wrong.join("\n"));
    for (name, _) in MUTATORS {
        let [caught, harmless] = counts.get(name).copied().unwrap_or_default();
        assert!(caught > 0, "`{name}` made {caught} mutants that were caught, {harmless} harmless ones");
    }
}

/// Of a message that nobody packs, whose tensors are written where they are sent from, too.
#[test]
fn what_is_to_be_sent_is_not_unpacked() {
    let (mut n, mut n_written_there) = (0, 0);
    for case in &corpus() {
        for (id, frame) in case.schedule.frames.iter() {
            for (i, task) in frame.tasks.iter().enumerate() {
                let Work::Unpack(_) = task.work else { continue };
                let exchange = frame.tasks.iter().find(|t| t.writes.first() == task.reads.first());
                let sent = exchange.unwrap().reads[0];
                if !matches!(frame.buffers[sent].content, Content::Wire { .. }) {
                    continue;
                }
                let mut mutant = case.schedule.clone();
                mutant.frames[id].tasks[i].reads[0] = sent;
                let found = judge(&mutant, case);
                let Some(Diagnostic { message, .. }) = found else { panic!("{}, task {i}", case.title) };
                assert!(tasks_named(&message) >= 2, "{}: {message}", case.title);
                n += 1;
                n_written_there += usize::from(!frame.tasks.iter().any(|t| t.writes.contains(&sent)));
            }
        }
    }
    assert!(n > n_written_there && n_written_there > 0, "{n_written_there} of {n}");
}

/// Calls that clear gradients, or write weights, hand nothing to others but what lasts.
#[test]
fn calls_that_are_given_nothing_are_named_with_whom_they_run_before() {
    let mut n_caught = 0;
    for case in corpus().iter().filter(|case| case.title.starts_with("pipeline")) {
        let main = case.schedule.main().unwrap();
        let tasks = &case.schedule.frames[main].tasks;
        let alone = |i: &usize| tasks[*i].reads.is_empty() && tasks[*i].writes.is_empty();
        for i in (0..tasks.len()).filter(alone) {
            for j in i + 1..tasks.len().min(i + 1 + tier::count(3, 15) as usize) {
                let mutant = swap(&case.schedule, main, i, j).unwrap();
                if let Some(Diagnostic { code: "S18", message, .. }) = judge(&mutant.schedule, case) {
                    assert!(tasks_named(&message) >= 2, "{}: {message}", case.title);
                    n_caught += 1;
                }
            }
        }
    }
    assert!(n_caught > 0);
}

#[test]
fn what_some_ranks_do_otherwise_is_caught() {
    type Kind = (&'static str, fn(&Schedule, &mut Choices) -> Option<Odd>);
    let kinds: [Kind; 3] = [
        ("swap two collectives on one rank", swap_on_one_rank),
        ("drop a collective on one rank", drop_on_one_rank),
        ("drop a task of a stage", drop_on_one_stage),
    ];
    let mut codes: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    for (c, case) in corpus().iter().enumerate() {
        for (m, (name, mutate)) in kinds.iter().enumerate() {
            for round in 2 * rounds().start..2 * rounds().end {
                let mut choices = Choices::from_seed(1 << 62 | round << 32 | (c as u64) << 8 | m as u64);
                let Some(odd) = mutate(&case.schedule, &mut choices) else { continue };
                let n = case.schedule.space.mesh.size(odd.axis);
                let schedules = (0..n).map(|i| schedule::Party {
                    at: Some(odd.at(i)),
                    schedule: if i == 0 { &odd.mutant } else { &case.schedule },
                });
                let found = schedule::verify_together(&schedules.collect::<Vec<_>>());
                let Err(found) = found else { panic!("{}, {name}, round {round}: not caught", case.title) };
                let Diagnostic { code, message, .. } = &found[0];
                *codes.entry((name, code)).or_default() += 1;
                if *code == "S16" {
                    assert!(tasks_named(message) >= 2, "{}, {name}: {message}", case.title);
                }
            }
            let unchanged = (0..1).map(|_| schedule::Party { at: None, schedule: &case.schedule });
            assert!(schedule::verify_together(&unchanged.collect::<Vec<_>>()).is_ok(), "{}", case.title);
        }
    }
    let of = |code: &str| codes.iter().filter(|((_, c), _)| *c == code).map(|(_, n)| n).sum::<usize>();
    assert!(of("S16") > 5 && of("S17") > 0, "{codes:?}");
}
