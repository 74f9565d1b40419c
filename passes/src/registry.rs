//! The strategies, movements and passes that are known: those that come with Ithaca, and those that are added.

use ithaca_ir::Diagnostic;

use crate::movement::{MOVEMENTS, Movement};
use crate::pass::Pass;
use crate::shard::{STRATEGIES, Strategy};

/// Strategies, movements and passes of one's own, by name.
///
/// Whatever looks a name up takes a registry: [`compile_with`](crate::compile::compile_with),
/// [`parse_with`](crate::pipeline::parse_with), [`Extended`](crate::planner::Extended) for the planner, and the command
/// line.
///
/// ```
/// use ithaca_passes::registry::Registry;
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

    /// Passes beyond those that come with Ithaca, which are [`PASSES`](crate::pipeline::PASSES).
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

    /// The strategy called `name`, if there is one. Products are read by [`product`](crate::shard::strategy::product).
    pub fn strategy(&self, name: &str) -> Option<&'static dyn Strategy> {
        self.strategies().find(|s| s.name() == name)
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
}
