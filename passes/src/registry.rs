//! The strategies and movements that are known: those that come with Ithaca, and those that are added.

use ithaca_ir::Diagnostic;

use crate::movement::{MOVEMENTS, Movement};
use crate::shard::{STRATEGIES, Strategy};

/// Strategies and movements by name.
///
/// ```
/// use ithaca_passes::registry::Registry;
/// assert!(Registry::default().strategies().any(|s| s.name() == "ring"));
/// ```
#[derive(Clone)]
pub struct Registry {
    strategies: Vec<&'static dyn Strategy>,
    movements: Vec<&'static dyn Movement>,
}

impl Default for Registry {
    /// What comes with Ithaca.
    fn default() -> Self {
        Self { strategies: STRATEGIES.to_vec(), movements: MOVEMENTS.to_vec() }
    }
}

impl std::fmt::Debug for Registry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let strategies: Vec<&str> = self.strategies().map(|s| s.name()).collect();
        let movements: Vec<&str> = self.movements().map(|m| m.name()).collect();
        f.debug_struct("Registry").field("strategies", &strategies).field("movements", &movements).finish()
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
            let known: Vec<&str> = self.movements().map(|m| m.name()).collect();
            Diagnostic::new("P47", format!("there is no movement `{name}`"))
                .help(format!("movements: {}", known.join(", ")))
        })
    }
}
