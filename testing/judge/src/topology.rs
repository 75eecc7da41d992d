//! Quality of chosen GPU sets on real machines, relative to other policies and to a clairvoyant.
//!
//! ```text
//! machines::read (link matrices) -> LinkMatrix -> policies: sets for a request
//!                                       |             |-> per_request  every set of free GPUs, one request
//!                                       |             |-> sequence     requests until the first that does not fit
//!                                       |             '-> speed        time of one decision
//!                                       '-> clairvoyant: the optimum of a sequence that is known in advance
//! ```
//!
//! The score of a pair is 100 per NVLink plus one PCIe level (`SYS` 10 to same board 60). The score
//! of a set is the sum over its pairs.

mod best_effort;
mod clairvoyant;
pub mod machines;
pub mod per_request;
pub mod policies;
pub mod sequence;
pub mod speed;

pub use clairvoyant::Clairvoyant;

/// Maximum number of GPUs for quality measurements. On larger machines only the speed is measured,
/// because the sets of free GPUs and the clairvoyant cannot be enumerated.
pub const MAX_ENUMERATED: usize = 16;
