//! Deployments that serve requests at a rate: which layouts, how many sequences at once, and how many GPUs.
//!
//! A replica is a group of GPUs that holds the model once. In a deployment of one pool each replica computes prompts in chunks
//! between the steps that decode; in one of two pools some replicas compute prompts and send their caches to others that decode.
//! Times of steps are those of the planner, and the rest is arithmetic:
//!
//! - A replica that decodes `b` sequences in steps of `t` seconds ends `b / (O · T)` requests of `O` output tokens a second, where
//!   `T` is `t` and the share of the prompts' chunks between two steps: `T = t + b · n · c / (O · g)` for `n` chunks of `c` seconds
//!   for the prompts of `g` requests at once. `T` is the time per output token.
//! - Prompts wait as in a queue with random arrivals and a fixed time of service `s` (M/D/1): `ρ s / (2 (1 − ρ))` on average, where
//!   `ρ` is the part of the time that is busy. The time to the first token is this wait and the service; in one pool chunks take turns
//!   with steps that decode, so `s = n · (c + t)`, and in two pools the caches travel afterwards.
//! - Figures are averages at full load; requests come evenly to replicas.

mod deployment;
mod search;

pub use deployment::{Demand, Deployment, Part};
pub use search::{Decoding, Outcome, Prompts, Replica, search};
