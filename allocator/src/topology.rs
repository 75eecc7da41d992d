//! Topology: choice of a set of devices of one machine, by links and by the value of the rest.
//!
//! ```text
//! LinkMatrix (scores of pairs, shared scopes) --ResidualValue--> value of remaining devices
//!      |                                                 |
//!      '--- SetChooser::choose, SetChooser::sets --------+--> best set, next best, ...
//!           (free devices, count, preferences)           '--> Shortfall: why no set is valid
//! ```
//!
//! **Score.** A pair scores 100 for each NVLink between the two devices, plus 10 (`SYS`) to 60
//! (same board) for the PCIe level, as in NVIDIA's allocator for the device plugin. A set scores
//! the sum over its pairs.
//!
//! **Residual value.** Taking the best set each time breaks sets that later requests need. So a set
//! is rated by its score plus the *residual value* of the remaining devices: the expected sum of
//! scores of later requests until the first one that does not fit, each served in the same way.
//! This is the value function of a Markov decision process whose states are the sets of free
//! devices. For a given distribution of sizes no online policy achieves a higher sum of scores. A
//! floor protects the current request: sets below four fifths of the best current score are not
//! taken.
//!
//! **Complexity.** Devices with equal links to all other devices are *twins*; it does not matter
//! which of them is taken. States are counts of free twins, so sixteen GPUs on switches have 6,561
//! states instead of 65,536, and a value is one table look-up. Machines with more than
//! [`ResidualValue::MAX_STATES`] states use an estimate.
//!
//! Devices are matrix positions. The module does not depend on Kubernetes objects.

mod branch_and_bound;
mod chooser;
mod device_set;
mod enumerate;
mod matrix;
mod preferences;
mod request;
mod sets;
mod shortfall;
mod size_mix;
mod value;

pub use chooser::SetChooser;
pub use device_set::DeviceSet;
pub use matrix::{DeviceLinks, DeviceLocation, LinkMatrix, Score, TooManyDevices};
pub use preferences::TopologyPreferences;
pub use request::{OutOfSteps, SetChoice, SetRequest};
pub use sets::RankedSets;
pub use shortfall::{ScopeShortfall, Shortfall};
pub use size_mix::SizeMix;
pub use value::ResidualValue;
