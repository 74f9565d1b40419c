//! From a program to a checked schedule: the passes every plan runs.

use std::time::Duration;

use ithaca_ir::module::Level;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::verify::{Verified, VerifiedModule, verify};
use ithaca_ir::{Diagnostics, Module, Op};
use ithaca_pass::choices::{Choices, Source};
use ithaca_pass::{Context, Instrument, Pass, Prices, Unwatched, run_on};

use crate::fuse::Accumulate;
use crate::fuse::prefetch::NO_EFFECT;
use crate::lower::{Packing, lower_with};
use crate::lower_movements::{LowerMovements, Options};
use crate::movement::LOCAL;
use crate::registry::Registry;
use crate::reshard::LowerReshards;
use crate::shard::{Shard, ShardOptions};

/// A program compiled for a mesh.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// The program of one rank.
    pub per_rank: VerifiedModule,
    /// Its schedule.
    pub schedule: Schedule,
    /// How each attention of the model was to be distributed, before its movement became steps.
    pub attention: Vec<AttentionUse>,
    /// Notes to the user: copied heads, padding, dimensions that stay whole.
    pub notes: Vec<String>,
    /// What was chosen on the way, by prices or as an earlier compilation had chosen.
    pub choices: Choices,
}

/// The movement of attention in a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttentionUse {
    /// The function.
    pub function: String,
    /// The movement with its options, `local` where keys are whole.
    pub movement: String,
}

/// The passes of [`compile_with`].
pub fn passes(registry: &Registry, options: &ShardOptions) -> Vec<Box<dyn Pass>> {
    let mut passes: Vec<Box<dyn Pass>> = vec![
        Box::new(Shard::new(options.clone()).with_registry(registry.clone())),
        Box::new(LowerMovements::new(registry.clone(), Options { partials: options.partials })),
    ];
    passes.extend(options.fusion.before());
    passes.push(Box::new(LowerReshards));
    passes.push(Box::new(Accumulate));
    passes.extend(options.fusion.passes());
    passes
}

/// Lays `module` out by `options`, chooses collectives by `prices`, and lowers to a verified schedule.
///
/// # Errors
/// `P` diagnostics when the layout is not legal.
pub fn compile(
    module: &Module,
    options: &ShardOptions,
    prices: &dyn Prices,
) -> Result<Compiled, Diagnostics> {
    compile_with(&Registry::default(), module, options, prices)
}

/// As [`compile`], with the strategies and movements of `registry`.
///
/// # Errors
/// As [`compile`].
pub fn compile_with(
    registry: &Registry,
    module: &Module,
    options: &ShardOptions,
    prices: &dyn Prices,
) -> Result<Compiled, Diagnostics> {
    compile_by(&passes(registry, options), options.fusion.packing, module, prices, &mut Unwatched)
        .map(|compiled| unasked(compiled, options))
}

/// Without the note that a pass has no effect which is there by default.
fn unasked(mut compiled: Compiled, options: &ShardOptions) -> Compiled {
    if options.fusion == options.zero.usual_fusion() {
        compiled.notes.retain(|note| note != NO_EFFECT);
    }
    compiled
}

/// As [`compile_with`], with recorded choices in place of prices: those of a plan, for its program or for a small one of the
/// same structure.
///
/// # Errors
/// As [`compile`]; `P05` for a choice that the record does not have, or that is impossible for the program.
pub fn replay(
    registry: &Registry,
    module: &Module,
    options: &ShardOptions,
    choices: &Choices,
) -> Result<Compiled, Diagnostics> {
    let (passes, packing) = (passes(registry, options), options.fusion.packing);
    let compiled = draft_by(&passes, packing, verify(module)?, Source::Record(choices), &mut Unwatched)?;
    verify_schedule(&compiled)?;
    Ok(unasked(compiled, options))
}

/// A program to a verified schedule by `passes`, which leave a per-rank program: those of [`passes`], with passes of
/// your own wherever they belong.
///
/// # Errors
/// `P` diagnostics of the pass that refused, or of the verifier when a pass broke the module.
pub fn compile_by(
    passes: &[Box<dyn Pass>],
    packing: Packing,
    module: &Module,
    prices: &dyn Prices,
    instrument: &mut dyn Instrument,
) -> Result<Compiled, Diagnostics> {
    let compiled = draft_by(passes, packing, verify(module)?, Source::Prices(prices), instrument)?;
    verify_schedule(&compiled)?;
    Ok(compiled)
}

/// Checks a schedule that [`draft_with`] left unchecked: by itself, and against its program.
///
/// # Errors
/// `S` diagnostics when lowering broke an invariant.
pub fn verify_schedule(compiled: &Compiled) -> Result<(), Diagnostics> {
    let Compiled { per_rank, schedule, .. } = compiled;
    std::thread::scope(|scope| {
        let right = scope.spawn(|| ithaca_ir::schedule::verify_meaning(schedule, per_rank.verified()));
        ithaca_ir::schedule::verify(schedule)?;
        right.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// As [`compile_with`], with a schedule that is not checked: enough to price a candidate that may never be run. Its
/// program is verified after every pass.
///
/// # Errors
/// `P` diagnostics when the layout is not legal.
pub fn draft_with(
    registry: &Registry,
    module: Verified<'_>,
    options: &ShardOptions,
    prices: &dyn Prices,
) -> Result<Compiled, Diagnostics> {
    let (passes, packing) = (passes(registry, options), options.fusion.packing);
    draft_by(&passes, packing, module, Source::Prices(prices), &mut Unwatched)
        .map(|compiled| unasked(compiled, options))
}

fn draft_by(
    passes: &[Box<dyn Pass>],
    packing: Packing,
    module: Verified<'_>,
    source: Source<'_>,
    instrument: &mut dyn Instrument,
) -> Result<Compiled, Diagnostics> {
    let mut cx = Context::from(source);
    let mut seen = Seen { attention: None, watched: instrument };
    let last = run_on(module, passes, &mut cx, &mut seen)?;
    let attention = seen.attention.unwrap_or_default();
    let per_rank = last.unwrap_or_else(|| module.into());
    let schedule = lower_with(per_rank.verified(), packing)?;
    Ok(Compiled { per_rank, schedule, attention, notes: cx.notes().to_vec(), choices: cx.choices().clone() })
}

/// Keeps the attention of the first module that is laid out.
struct Seen<'a> {
    attention: Option<Vec<AttentionUse>>,
    watched: &'a mut dyn Instrument,
}

impl Instrument for Seen<'_> {
    fn after(&mut self, pass: &dyn Pass, module: &Module, took: Duration) {
        if module.level == Level::Sharded {
            self.attention.get_or_insert_with(|| attention(module));
        }
        self.watched.after(pass, module, took);
    }
}

/// Every function with attention and every movement that it has.
fn attention(module: &Module) -> Vec<AttentionUse> {
    let mut found = Vec::new();
    for function in module.functions.values() {
        for node in &function.nodes {
            let (Op::Attention(a) | Op::AttentionBackward(a)) = &node.op else { continue };
            let movement = a.movement.as_ref().map_or(LOCAL.to_owned(), ToString::to_string);
            let one = AttentionUse { function: function.name.clone(), movement };
            if !found.contains(&one) {
                found.push(one);
            }
        }
    }
    found
}
