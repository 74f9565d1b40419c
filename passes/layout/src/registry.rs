//! The strategies, movements and passes that are known: those that come with Ithaca, and those that are added.

use ithaca_ir::{Diagnostic, Mesh, ops};
use ithaca_pass::Pass;

use crate::movement::{MOVEMENTS, Movement, check_options};
use crate::strategy::{CONTEXT_AXIS, DATA_AXIS, EXPERT_AXIS, STAGE_AXIS, STRATEGIES, Strategy, TENSOR_AXIS};

/// The strategies that the axes of a mesh imply, in the order of a product: before the named strategies, and after them.
const IMPLIED: [&[(&str, &str)]; 2] = [
    &[(DATA_AXIS, "data-parallel"), (STAGE_AXIS, "pipeline")],
    &[(TENSOR_AXIS, "megatron-tp"), (CONTEXT_AXIS, "decode-context"), (EXPERT_AXIS, "ep")],
];

/// Strategies, movements and passes of one's own, by name.
///
/// Whatever looks a name up takes a registry: [`compile_with`](crate::compile::compile_with), the reader of pipelines, the
/// planner, and the command line.
///
/// ```
/// use ithaca_layout::registry::Registry;
/// assert!(Registry::default().strategies().any(|s| s.name() == "ring"));
/// ```
#[derive(Clone)]
pub struct Registry {
    strategies: Vec<&'static dyn Strategy>,
    movements: Vec<&'static dyn Movement>,
    passes: Vec<&'static (dyn Pass + Sync)>,
}

impl Default for Registry {
    /// What comes with Ithaca.
    fn default() -> Self {
        Self { strategies: STRATEGIES.to_vec(), movements: MOVEMENTS.to_vec(), passes: Vec::new() }
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let strategies: Vec<&str> = self.strategies().map(|s| s.name()).collect();
        let movements: Vec<&str> = self.movements().map(|m| m.name()).collect();
        let passes: Vec<&str> = self.passes().map(|p| p.name()).collect();
        f.debug_struct("Registry")
            .field("strategies", &strategies)
            .field("movements", &movements)
            .field("passes", &passes)
            .finish()
    }
}

impl Registry {
    /// With one strategy more; one of the same name is replaced.
    pub fn with_strategy(mut self, strategy: &'static dyn Strategy) -> Self {
        self.strategies.retain(|s| s.name() != strategy.name());
        self.strategies.push(strategy);
        self
    }

    /// With one movement more; one of the same name is replaced.
    pub fn with_movement(mut self, movement: &'static dyn Movement) -> Self {
        self.movements.retain(|m| m.name() != movement.name());
        self.movements.push(movement);
        self
    }

    /// With one pass more, which pipelines name without options; one of the same name is replaced. A pass that comes
    /// with Ithaca is not.
    pub fn with_pass(mut self, pass: &'static (dyn Pass + Sync)) -> Self {
        self.passes.retain(|p| p.name() != pass.name());
        self.passes.push(pass);
        self
    }

    /// Passes beyond those that come with Ithaca, which pipelines know.
    pub fn passes(&self) -> impl Iterator<Item = &'static (dyn Pass + Sync)> + '_ {
        self.passes.iter().copied()
    }

    /// Strategies, in the order of the documentation.
    pub fn strategies(&self) -> impl Iterator<Item = &'static dyn Strategy> + '_ {
        self.strategies.iter().copied()
    }

    /// Movements, in the order of the documentation.
    pub fn movements(&self) -> impl Iterator<Item = &'static dyn Movement> + '_ {
        self.movements.iter().copied()
    }

    /// The strategy called `name`, if there is one. Products are read by [`product`](Self::product).
    pub fn strategy(&self, name: &str) -> Option<&'static dyn Strategy> {
        self.strategies().find(|s| s.name() == name)
    }

    /// A product of strategies: the names between the plus signs.
    ///
    /// # Errors
    /// `P10` for an unknown name, and for two strategies that use the same axis.
    pub fn product(&self, text: &str) -> Result<Vec<&'static dyn Strategy>, Diagnostic> {
        let mut strategies: Vec<&'static dyn Strategy> = Vec::new();
        for name in text.split('+').map(str::trim) {
            let Some(strategy) = self.strategy(name) else {
                let known = self.strategies().map(|s| s.name());
                let refusal = Diagnostic::new("P10", format!("there is no strategy `{name}`"));
                // An axis that only one strategy needs, as `tp`, stands for it.
                let by_axis = self.strategies().find(|s| s.axes() == [name]).map_or(name, |s| s.name());
                return Err(refusal.names("strategies, or several joined by `+`", by_axis, known));
            };
            for other in &strategies {
                if let Some(axis) = strategy.axes().iter().find(|a| other.axes().contains(a)) {
                    let message = format!(
                        "strategies `{}` and `{}` both use axis `{axis}`",
                        other.name(),
                        strategy.name()
                    );
                    return Err(Diagnostic::new("P10", message));
                }
            }
            strategies.push(strategy);
        }
        Ok(strategies)
    }

    /// The product `named` with a strategy for each axis `dp`, `pp`, `tp`, `dcp` and `ep` of the mesh that it does not use:
    /// `ulysses` on `dp=2,ulysses=2` is `data-parallel+ulysses`. Axes in `taken` are used otherwise.
    ///
    /// A malformed product is returned as it is; an axis whose strategy is not in the registry adds nothing.
    pub fn with_implied(&self, named: Option<&str>, mesh: &Mesh, taken: &[String]) -> Option<String> {
        let used: Vec<&str> = match named.map(|named| self.product(named)) {
            Some(Ok(strategies)) => strategies.iter().flat_map(|s| s.axes()).copied().collect(),
            Some(Err(_)) => return named.map(str::to_owned),
            None => Vec::new(),
        };
        let is_implied = |(axis, strategy): &&(&str, &str)| {
            let is_free = !used.contains(axis) && !taken.iter().any(|other| other == axis);
            is_free && mesh.axis(axis).is_some() && self.strategy(strategy).is_some()
        };
        let [before, after] = IMPLIED.map(|implied| implied.iter().filter(is_implied).map(|&(_, name)| name));
        let names: Vec<&str> = before.chain(named).chain(after).collect();
        (!names.is_empty()).then(|| names.join("+"))
    }

    /// The movement called `name`.
    ///
    /// # Errors
    /// `P47` for an unknown name.
    pub fn movement(&self, name: &str) -> Result<&'static dyn Movement, Diagnostic> {
        self.movements().find(|m| m.name() == name).ok_or_else(|| {
            let known = self.movements().map(|m| m.name());
            Diagnostic::new("P47", format!("there is no movement `{name}`")).names("movements", name, known)
        })
    }

    /// Checks that a movement is known, and has the options that are stated.
    ///
    /// # Errors
    /// `P47` for an unknown name, and for an option that it does not have or that occurs twice.
    pub fn check_movement(&self, stated: &ops::Movement) -> Result<(), Diagnostic> {
        check_options(self.movement(&stated.name)?, &stated.options)
    }
}
