//! Inputs and state of a search in progress.

use super::outcome::SearchFailure;
use super::state::SearchState;
use super::symmetry::{Symmetry, Verdict};
use crate::cluster::{Interner, ReachableDevices};
use crate::features::FeatureGates;
use crate::policy::ForecastView;
use crate::shape::{Selections, Shape};
use crate::wide_hash::WideHash;

/// Inputs of a search.
pub(crate) struct Search<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) reachable: &'a ReachableDevices,
    pub(crate) features: &'a FeatureGates,
    pub(crate) interner: &'a mut Interner,
    pub(crate) selections: &'a mut Selections,
    /// Remaining budget; one step is one device tested.
    pub(crate) steps: &'a mut u64,
    /// Seed of randomized policies.
    pub(crate) seed: u64,
    /// Forecast for policies that use it.
    pub(crate) forecast_view: ForecastView<'a>,
}

/// Reason why the recursion stops without a result.
pub(super) enum Stop {
    Failed(usize, SearchFailure),
    OutOfSteps,
}

pub(super) type Progress = Result<bool, Stop>;

/// A search in progress.
pub(super) struct Run<'a> {
    pub(super) search: Search<'a>,
    pub(super) state: SearchState<'a>,
    /// Verdict per alternative and candidate, alternative by alternative.
    pub(super) verdicts: Vec<Verdict>,
    /// Candidates of each alternative with mode "all".
    pub(super) all_candidates: Vec<Vec<usize>>,
    /// Order of candidates per alternative; `None` keeps upstream's order.
    pub(super) orders: Vec<Option<Vec<usize>>>,
    pub(super) symmetry: Option<Symmetry>,
    /// True if no candidate can cause an error. Then infeasibility is found by counting, and the
    /// order is the policy's. Otherwise upstream's order decides whether an error is reached.
    pub(super) is_plain: bool,
    pub(super) unsolvable:
        std::collections::HashSet<(usize, u64, usize, WideHash), foldhash::fast::FixedState>,
}

impl<'a> Run<'a> {
    /// Starts a search.
    pub(super) fn new(search: Search<'a>) -> Self {
        let (shape, reachable) = (search.shape, search.reachable);
        let alternatives = shape.alternatives.len();
        Self {
            state: SearchState::new(shape, reachable),
            verdicts: vec![Verdict::Unknown; alternatives * reachable.candidates.len()],
            all_candidates: vec![Vec::new(); alternatives],
            orders: vec![None; alternatives],
            symmetry: None,
            is_plain: false,
            unsolvable: Default::default(),
            search,
        }
    }
}
