//! The choice of a set.

use std::sync::Arc;

use super::matrix::Score;
use super::{DeviceSet, LinkMatrix, ResidualValue, Sets, Shortfall, SizeMix, Wishes};

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetRequest {
    /// How many devices.
    pub count: usize,
    /// Devices that may be taken.
    pub candidates: DeviceSet,
    /// Devices that are free as a whole: what is left of them has a residual value. A candidate
    /// that is not among them (a GPU that is shared already) costs later requests nothing.
    pub free: DeviceSet,
    /// How the devices shall belong together.
    pub wishes: Wishes,
}

/// A set of devices that can be taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// The devices.
    pub devices: DeviceSet,
    /// Its score: the sum over its pairs.
    pub score: Score,
    /// Score of the pair that is joined worst; `None` for fewer than two devices.
    pub weakest_pair: Option<Score>,
    /// Whether no set is better. `false` where there were too many to look at all of them.
    pub proven: bool,
}

/// The steps that the caller granted are spent before there was an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not decided: the step budget is spent")]
pub struct OutOfSteps;

/// Chooses sets of one machine's devices. Made once for machines with equal matrices, as long as
/// the size mix stays.
#[derive(Debug)]
pub struct SetChooser {
    matrix: Arc<LinkMatrix>,
    value: ResidualValue,
}

impl SetChooser {
    /// The chooser for a machine on which requests of these sizes are expected. Computes the
    /// residual values: below a millisecond for eight devices, ten for sixteen on switches, 0.2
    /// s at most.
    pub fn new(matrix: Arc<LinkMatrix>, mix: &SizeMix) -> Self {
        let value = ResidualValue::new(&matrix, mix);
        Self { matrix, value }
    }

    /// A chooser with other residual values.
    pub fn with_value(matrix: Arc<LinkMatrix>, value: ResidualValue) -> Self {
        Self { matrix, value }
    }

    /// The machine.
    pub fn matrix(&self) -> &LinkMatrix {
        &self.matrix
    }

    /// The residual values.
    pub fn value(&self) -> &ResidualValue {
        &self.value
    }

    /// The best set: of those with the most preferred pairs and at least four fifths of the best
    /// score among them, the one whose score and residual value together are the highest.
    /// `None` if no set holds what is required.
    ///
    /// One step is one set, or one device looked at where there are too many sets.
    ///
    /// # Errors
    /// The steps are spent before a set was found or found impossible.
    pub fn choose(
        &self,
        request: &SetRequest,
        steps: &mut u64,
    ) -> Result<Option<Choice>, OutOfSteps> {
        self.sets(request).next(steps)
    }

    /// All sets, the best first. Where there are too many to be ranked, the first is the best that
    /// could be found and the others come in the order of their positions.
    pub fn sets(&self, request: &SetRequest) -> Sets<'_> {
        Sets::new(self, request)
    }

    /// Why no set holds what is required.
    pub fn shortfall(&self, request: &SetRequest) -> Shortfall {
        Shortfall::of(&self.matrix, request)
    }

    pub(super) fn choice(&self, devices: DeviceSet, score: Score, proven: bool) -> Choice {
        Choice { devices, score, weakest_pair: self.matrix.weakest_pair(devices), proven }
    }
}
