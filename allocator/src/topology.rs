//! Which devices of one machine a request of several gets: those that are joined best, while good
//! sets stay whole for later.
//!
//! ```text
//! LinkMatrix (score of each pair, who shares what) --ResidualValue--> worth of what is left, by what is free
//!      |                                                    |
//!      '--- SetChooser::choose / sets (free devices, count, wishes) --> the best set, the next best, ...
//!                                                        '--> Shortfall: why no set fulfils what is required
//! ```
//!
//! **Score.** A pair scores 100 for each NVLink between the two, plus one PCIe level (`SYS` 10 to
//! same board 60): the measure of NVIDIA's own allocator. A set scores the sum over its pairs.
//!
//! **What is kept for later.** Taking the best set each time breaks sets that the next requests
//! need. So a set is judged by its score plus the *residual value* of the devices that it leaves:
//! the expected sum of scores of the requests to come, until the first that does not fit, each
//! served in the same way. That is the value function of a Markov decision process whose states are
//! the sets of free devices; for a given distribution of sizes no online policy does better in the
//! sum of scores. A floor keeps it from being unfair to the one who asks now: a set with less than
//! four fifths of the best score that is possible now is not taken.
//!
//! **Why it is fast.** Devices that every other device is joined to alike are *twins*: which of
//! them is taken makes no difference. States are counts of free twins, so that sixteen GPUs on
//! switches are 6,561 states and not 65,536, and a value is one look-up. Machines of more than
//! [`ResidualValue::MAX_STATES`] states get an estimate in place of the exact value.
//!
//! Devices are positions in the matrix. Nothing here knows of Kubernetes, claims or names.

mod bound;
mod chooser;
mod device_set;
mod enumerate;
mod matrix;
mod sets;
mod shortfall;
mod size_mix;
mod value;
mod wishes;

pub use chooser::{Choice, OutOfSteps, SetChooser, SetRequest};
pub use device_set::DeviceSet;
pub use matrix::{LinkMatrix, Pair, Place, Score, TooManyDevices};
pub use sets::Sets;
pub use shortfall::{ScopeShortfall, Shortfall};
pub use size_mix::SizeMix;
pub use value::ResidualValue;
pub use wishes::Wishes;
