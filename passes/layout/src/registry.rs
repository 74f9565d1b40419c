//! The strategies, movements and passes that are known: those that come with Ithaca, and those that are added.

use ithaca_ir::Diagnostic;
use ithaca_pass::Pass;

use crate::movement::{MOVEMENTS, Movement};
use crate::strategy::{STRATEGIES, Strategy};

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
                let known: Vec<&str> = self.strategies().map(|s| s.name()).collect();
                return Err(Diagnostic::new("P10", format!("there is no strategy `{name}`"))
                    .help(format!("strategies: {}; a product is written with a plus", known.join(", "))));
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

    /// The movement called `name`.
    ///
    /// # Errors
    /// `P47` for an unknown name.
    pub fn movement(&self, name: &str) -> Result<&'static dyn Movement, Diagnostic> {
        self.movements().find(|m| m.name() == name).ok_or_else(|| {
            let known: Vec<&str> = self.movements().map(|m| m.name()).collect();
            Diagnostic::new("P47", format!("there is no movement `{name}`"))
                .help(format!("movements: {}", known.join(", ")))
        })
    }
}
