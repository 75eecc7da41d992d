//! Mix of expected requests, learned from the requests seen.

use std::collections::BTreeMap;

use super::potential::Potential;
use super::request::{GpuFraction, GpuRequest, GpuTypes};

/// Decay constant in requests: after this many later requests, a request has the weight 1/e. About
/// a week of a busy cluster.
const DECAY_REQUESTS: f64 = 8192.0;

/// Weight of the default mix, in requests.
const PRIOR_REQUESTS: f64 = 64.0;

/// Default mix: shares of a GPU, one GPU and several GPUs, with their CPU requests, in percent.
const PRIOR_CLASSES: [(u64, u32, u32, f64); 7] = [
    // CPU in millicores, GPUs, thousandths of each GPU, percent
    (4000, 1, 125, 8.0),
    (4000, 1, 250, 12.0),
    (6000, 1, 500, 15.0),
    (8000, 1, 1000, 50.0),
    (16_000, 2, 1000, 6.0),
    (32_000, 4, 1000, 5.0),
    (64_000, 8, 1000, 4.0),
];

/// Weighted number of requests of a class, and of refusals for lack of capacity.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Count {
    observed: f64,
    refused: f64,
}

/// Limit at which the scale is reset, before additions lose precision.
const LARGE: f64 = 1e100;

/// Maximum number of classes; beyond it the rarest is removed.
const MAX_CLASSES: usize = 4096;

/// Relative frequency of each class of requests. Old requests lose weight exponentially.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestMix {
    /// Counts times `scale`.
    classes: BTreeMap<GpuRequest, Count>,
    /// Weight of a new request. It grows, which is equivalent to decreasing all older weights.
    scale: f64,
}

impl RequestMix {
    /// Creates a mix without requests.
    #[must_use]
    pub fn empty() -> Self {
        Self { classes: BTreeMap::new(), scale: 1.0 }
    }

    /// Creates the default mix, used before requests are seen.
    #[must_use]
    pub fn prior() -> Self {
        let request = |&(cpu_milli, gpus, share, percent): &(u64, u32, u32, f64)| {
            let share = GpuFraction::new(share);
            let observed = percent / 100.0 * PRIOR_REQUESTS;
            (
                GpuRequest { cpu_milli, gpus, share, types: GpuTypes::ANY },
                Count { observed, refused: 0.0 },
            )
        };
        Self { classes: PRIOR_CLASSES.iter().map(request).collect(), scale: 1.0 }
    }

    /// Counts a new request, whether it is placed or not.
    pub fn observe(&mut self, request: GpuRequest) {
        if self.scale > LARGE {
            for count in self.classes.values_mut() {
                count.observed /= self.scale;
                count.refused /= self.scale;
            }
            self.scale = 1.0;
        }
        self.classes.entry(request).or_default().observed += self.scale;
        self.scale *= 1.0 + 1.0 / DECAY_REQUESTS;
        if self.classes.len() > MAX_CLASSES {
            self.remove_rarest();
        }
    }

    /// Counts a refusal of an observed request. Unknown requests are ignored.
    pub fn observe_refusal(&mut self, request: GpuRequest) {
        if let Some(count) = self.classes.get_mut(&request) {
            count.refused += self.scale;
        }
    }

    fn remove_rarest(&mut self) {
        let rarest = self
            .classes
            .iter()
            .min_by(|a, b| a.1.observed.total_cmp(&b.1.observed))
            .map(|(request, _)| *request);
        rarest.map(|request| self.classes.remove(&request));
    }

    /// Returns the classes that need GPUs, with their fractions of these requests; the sum is 1.
    pub(super) fn parts(&self) -> Vec<(GpuRequest, f64)> {
        self.weighted(0.0)
    }

    /// Returns the classes with refusals weighted by `times`. The fractions refer to all requests,
    /// so their sum exceeds 1.
    pub(super) fn weighted(&self, times: f64) -> Vec<(GpuRequest, f64)> {
        let of_gpus = || self.classes.iter().filter(|(request, _)| request.total_milli() > 0);
        let sum: f64 = of_gpus().map(|(_, count)| count.observed).sum();
        of_gpus()
            .map(|(request, count)| (*request, (count.observed + times * count.refused) / sum))
            .collect()
    }
}

/// A [`RequestMix`] that is updated by each request, with its potential.
///
/// Each pod is reported at most twice, however often it is planned: [`RequestMixLearner::observe`]
/// when it is first seen, and [`RequestMixLearner::observe_refusal`] at its first refusal for lack
/// of capacity. Either call is a map look-up.
///
/// The potential is computed again only after the mix has changed enough: often at first, then
/// at most every `MAX_BETWEEN_UPDATES` requests.
#[derive(Debug, Clone)]
pub struct RequestMixLearner {
    mix: RequestMix,
    potential: Potential,
    observed: u64,
    /// Number of observations at which the next potential is computed.
    due: u64,
}

/// Number of requests before the first computation.
const FIRST_UPDATE: u64 = 32;
/// Later computations follow after an eighth more requests, but at most this number.
const MAX_BETWEEN_UPDATES: u64 = 1024;

impl RequestMixLearner {
    /// Creates a learner that starts with `mix`.
    #[must_use]
    pub fn new(mix: RequestMix) -> Self {
        let potential = Potential::new(&mix);
        Self { mix, potential, observed: 0, due: FIRST_UPDATE }
    }

    /// Counts a request. Returns true if the potential changed, so that earlier results are
    /// outdated.
    pub fn observe(&mut self, request: GpuRequest) -> bool {
        self.mix.observe(request);
        self.observed += 1;
        let is_due = self.observed >= self.due;
        if is_due {
            self.potential = Potential::new(&self.mix);
            self.due = self.observed + (self.observed / 8).min(MAX_BETWEEN_UPDATES);
        }
        is_due
    }

    /// Counts the refusal of an observed request; call it once per pod. The potential does not
    /// change before [`RequestMixLearner::observe`] returns true.
    pub fn observe_refusal(&mut self, request: GpuRequest) {
        self.mix.observe_refusal(request);
    }

    /// Returns the potential for the learned mix.
    #[must_use]
    pub fn potential(&self) -> &Potential {
        &self.potential
    }
}

impl Default for RequestMixLearner {
    fn default() -> Self {
        Self::new(RequestMix::prior())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(cpu_milli: u64, share: u32) -> GpuRequest {
        GpuRequest { cpu_milli, gpus: 1, share: GpuFraction::new(share), types: GpuTypes::ANY }
    }

    fn part(mix: &RequestMix, of: GpuRequest) -> f64 {
        mix.parts().into_iter().find(|(request, _)| *request == of).map_or(0.0, |(_, part)| part)
    }

    #[test]
    fn observed_requests_outweigh_the_default_mix() {
        let mut mix = RequestMix::prior();
        (0..1000).for_each(|_| mix.observe(request(3000, 810)));
        assert!(part(&mix, request(3000, 810)) > 0.9);
        assert!((mix.parts().iter().map(|(_, part)| part).sum::<f64>() - 1.0).abs() < 1e-9);
    }

    #[test]
    fn old_requests_fade() {
        let mut mix = RequestMix::empty();
        (0..20_000).for_each(|_| mix.observe(request(3000, 810)));
        (0..20_000).for_each(|_| mix.observe(request(8000, 470)));
        assert!(part(&mix, request(3000, 810)) < 0.15);
    }

    #[test]
    fn refused_request_gains_weight_without_reducing_others() {
        let (placed, refused) = (request(3000, 810), request(8000, 470));
        let mut mix = RequestMix::empty();
        [placed, refused].into_iter().for_each(|request| mix.observe(request));
        mix.observe_refusal(refused);
        mix.observe_refusal(request(1, 1));
        let weighted: Vec<(GpuRequest, i64)> = mix
            .weighted(30.0)
            .iter()
            .map(|&(request, part)| (request, (part * 100.0).round() as i64))
            .collect();
        assert_eq!(weighted, [(placed, 50), (refused, 1550)]);
        assert!((part(&mix, refused) - 0.5).abs() < 1e-3, "its frequency is unchanged");
    }

    #[test]
    fn pods_without_gpus_are_not_in_the_mix() {
        let mut mix = RequestMix::empty();
        mix.observe(GpuRequest { gpus: 0, share: GpuFraction::NONE, ..request(3000, 0) });
        mix.observe(request(3000, 810));
        assert_eq!(mix.parts(), [(request(3000, 810), 1.0)]);
    }

    #[test]
    fn number_of_classes_is_bounded() {
        let mut mix = RequestMix::empty();
        (0..5000).for_each(|cpu| mix.observe(request(cpu, 500)));
        assert_eq!(mix.parts().len(), MAX_CLASSES);
        assert!(part(&mix, request(4999, 500)) > 0.0, "the newest class stays");
    }

    #[test]
    fn potential_is_updated_less_often_over_time() {
        let mut learner = RequestMixLearner::new(RequestMix::empty());
        let learned: Vec<u64> =
            (1..=20_000).filter(|_| learner.observe(request(8000, 500))).collect();
        assert_eq!(learned[0], FIRST_UPDATE);
        assert!(learned.windows(2).all(|pair| pair[1] - pair[0] <= MAX_BETWEEN_UPDATES));
        assert!(learned.len() < 80, "{}", learned.len());
        let mut mix = RequestMix::empty();
        (0..*learned.last().unwrap()).for_each(|_| mix.observe(request(8000, 500)));
        assert_eq!(*learner.potential(), Potential::new(&mix));
    }
}
