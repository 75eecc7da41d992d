//! Chooser of device sets.

use std::sync::Arc;

use super::matrix::Score;
use super::request::{OutOfSteps, SetChoice, SetRequest};
use super::{DeviceSet, LinkMatrix, ResidualValue, Sets, Shortfall, SizeMix};

/// Chooses sets of devices of one machine. Machines with equal matrices share a chooser, for one
/// size mix.
#[derive(Debug)]
pub struct SetChooser {
    matrix: Arc<LinkMatrix>,
    value: ResidualValue,
}

impl SetChooser {
    /// Creates a chooser for requests with these sizes.
    ///
    /// Computes the residual values: less than 1 ms for eight devices, 10 ms for sixteen on
    /// switches, 0.2 s at most.
    pub fn new(matrix: Arc<LinkMatrix>, mix: &SizeMix) -> Self {
        let value = ResidualValue::new(&matrix, mix);
        Self { matrix, value }
    }

    /// Creates a chooser with given residual values.
    pub fn with_value(matrix: Arc<LinkMatrix>, value: ResidualValue) -> Self {
        Self { matrix, value }
    }

    /// Returns the link matrix.
    pub fn matrix(&self) -> &LinkMatrix {
        &self.matrix
    }

    /// Returns the residual values.
    pub fn value(&self) -> &ResidualValue {
        &self.value
    }

    /// Returns the best set; `None` if no set meets the requirements.
    ///
    /// Sets with the most preferred pairs and at least four fifths of the best score among them are
    /// compared by score plus residual value. One step is one set, or one device tested if there
    /// are too many sets.
    ///
    /// # Errors
    /// Returns [`OutOfSteps`] if the steps are spent before the search ends.
    pub fn choose(
        &self,
        request: &SetRequest,
        steps: &mut u64,
    ) -> Result<Option<SetChoice>, OutOfSteps> {
        self.sets(request).next(steps)
    }

    /// Returns all sets, best first. If there are too many to rank, only the first is the best one
    /// found, and the others follow in order of positions.
    pub fn sets(&self, request: &SetRequest) -> Sets<'_> {
        Sets::new(self, request)
    }

    /// Returns the reason why no set meets the requirements.
    pub fn shortfall(&self, request: &SetRequest) -> Shortfall {
        Shortfall::of(&self.matrix, request)
    }

    pub(super) fn choice(&self, devices: DeviceSet, score: Score, proven: bool) -> SetChoice {
        SetChoice { devices, score, weakest_pair: self.matrix.weakest_pair(devices), proven }
    }
}
