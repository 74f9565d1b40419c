//! Deployments that serve requests at a rate: which layouts, how many sequences at once, and how many GPUs.
//!
//! A replica is a group of GPUs that holds the model once. In a deployment of one pool each replica computes prompts in chunks
//! between the steps that decode; in one of two pools some replicas compute prompts and send their caches to others that decode.
//! Times of steps are those of the planner, and the rest is arithmetic:
//!
//! - A replica that decodes `b` sequences in steps of `t` seconds has a time per output token of `T`, which is `t` and the share of the
//!   prompts' chunks between two steps: `T = t + b · n · c / (O · g)` for answers of `O` tokens and `n` chunks of `c` seconds for the
//!   prompts of `g` requests at once. A request holds one of its `b` slots for `H = O · T + n · t` seconds, so it ends `b / H` requests
//!   a second. In two pools `T` is `t`, and `H` has the way of the caches in place of `n · t`.
//! - Requests wait for a slot as in a queue with random arrivals, a fixed time of service and `b` servers (M/D/b).
//! - Prompts wait as in a queue with random arrivals and a fixed time of service `s` (M/D/1): `ρ s / (2 (1 − ρ))` on average, where
//!   `ρ` is the part of the time that is busy. The time to the first token is these waits and the service; in one pool chunks take turns
//!   with steps that decode, so `s = n · (c + t)`, and in two pools the caches travel afterwards.
//! - Figures are averages at full load; requests come evenly to replicas.

mod deployment;
mod search;

pub use deployment::{Demand, Deployment, Part};
pub use search::{Decoding, Outcome, Prompts, Replica, search};
