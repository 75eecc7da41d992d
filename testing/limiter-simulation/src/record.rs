//! Record of a run.

use crate::MS;

/// Cumulative GPU time of each container, sampled every [`Record::STEP`].
#[derive(Debug, Default)]
pub struct Record {
    ran: Vec<Vec<u64>>,
    switched: Vec<u64>,
}

impl Record {
    /// Time between two samples.
    pub const STEP: u64 = 10 * MS;

    pub(crate) fn add_sample(&mut self, container: usize, ran: u64) {
        if self.ran.len() <= container {
            self.ran.resize(container + 1, Vec::new());
        }
        self.ran[container].push(ran);
    }

    pub(crate) fn add_switching_sample(&mut self, switched: u64) {
        self.switched.push(switched);
    }

    /// Returns the share of time spent in context switches.
    #[must_use]
    pub fn switching(&self, from: u64, to: u64) -> f64 {
        let at =
            |time: u64| self.switched[((time / Self::STEP) as usize).min(self.switched.len() - 1)];
        (at(to) - at(from)) as f64 / (to - from) as f64
    }

    /// Returns a container's share of the GPU between two times.
    #[must_use]
    pub fn part(&self, container: usize, from: u64, to: u64) -> f64 {
        let ran = &self.ran[container];
        let at = |time: u64| ran[((time / Self::STEP) as usize).min(ran.len() - 1)];
        (at(to) - at(from)) as f64 / (to - from) as f64
    }

    /// Returns a container's maximum share in any window of this length between `from` and `to`.
    #[must_use]
    pub fn most(&self, container: usize, window: u64, from: u64, to: u64) -> f64 {
        let starts = (from..).step_by(Self::STEP as usize).take_while(|start| start + window <= to);
        starts.map(|start| self.part(container, start, start + window)).fold(0.0, f64::max)
    }

    /// Returns the largest difference to `expected` in any window of this length after `from`.
    #[must_use]
    pub fn worst(&self, container: usize, expected: f64, window: u64, from: u64) -> f64 {
        let end = (self.ran[container].len() as u64 - 1) * Self::STEP;
        let starts =
            (from..).step_by((10 * Self::STEP) as usize).take_while(|start| start + window <= end);
        let errors =
            starts.map(|start| (self.part(container, start, start + window) - expected).abs());
        errors.fold(f64::NAN, f64::max)
    }
}
