//! Plans: the cost of a layout on a cluster, and the search for the layout that takes least time.
//!
//! A cluster prices kernels and messages, the simulator times a schedule by these prices, memory is counted, and the planner
//! tries every strategy on every mesh. The winner becomes a document.
//!
//! Architecture invariant: nothing here opens a device, a file or a clock of the user's, and nothing prints.

pub mod calibrate;
pub mod cluster;
pub mod cost;
pub mod memory;
pub mod plan;
pub mod planner;
pub mod proof;
pub mod report;
pub mod serve;
pub mod simulate;
