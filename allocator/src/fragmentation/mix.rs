//! Which requests are to be expected, learned from those that came.

use std::collections::BTreeMap;

use super::potential::Potential;
use super::request::{GpuMilli, GpuTypes, Request};

/// How many requests a new one counts as much as, after which it counts for 1/e: about a week of a
/// busy cluster.
const MEMORY: f64 = 8192.0;

/// How many requests the built-in prior counts for, before anything has come.
const PRIOR: f64 = 64.0;

/// The prior: pods that want part of a GPU, one, or several, with 8 cores to a GPU, in percent.
const PRIOR_CLASSES: [(u64, u32, u32, f64); 7] = [
    // CPU, GPUs, thousandths of each, percent
    (4000, 1, 125, 8.0),
    (4000, 1, 250, 12.0),
    (6000, 1, 500, 15.0),
    (8000, 1, 1000, 50.0),
    (16_000, 2, 1000, 6.0),
    (32_000, 4, 1000, 5.0),
    (64_000, 8, 1000, 4.0),
];

/// How often requests of a class came, and how often there was no room for them.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct Count {
    came: f64,
    refused: f64,
}

/// The scale is reset before numbers become too large to be added to.
const LARGE: f64 = 1e100;

/// More classes than this are not kept: the rarest goes.
const MOST_CLASSES: usize = 4096;

/// How often each class of requests comes, in proportion. Old requests fade.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestMix {
    /// Counts times `scale`.
    classes: BTreeMap<Request, Count>,
    /// What one request counts now: it grows, which has the same effect as letting all others
    /// fade.
    scale: f64,
}

impl RequestMix {
    /// Nothing is known.
    #[must_use]
    pub fn empty() -> Self {
        Self { classes: BTreeMap::new(), scale: 1.0 }
    }

    /// What is believed before anything has come.
    #[must_use]
    pub fn prior() -> Self {
        let request = |&(cpu_milli, gpus, share, percent): &(u64, u32, u32, f64)| {
            let share = GpuMilli::new(share);
            let came = percent / 100.0 * PRIOR;
            (Request { cpu_milli, gpus, share, types: GpuTypes::ANY }, Count { came, refused: 0.0 })
        };
        Self { classes: PRIOR_CLASSES.iter().map(request).collect(), scale: 1.0 }
    }

    /// Counts a request that has come, placed or not.
    pub fn observe(&mut self, request: Request) {
        if self.scale > LARGE {
            for count in self.classes.values_mut() {
                count.came /= self.scale;
                count.refused /= self.scale;
            }
            self.scale = 1.0;
        }
        self.classes.entry(request).or_default().came += self.scale;
        self.scale *= 1.0 + 1.0 / MEMORY;
        if self.classes.len() > MOST_CLASSES {
            self.forget_the_rarest();
        }
    }

    /// Says of a request that was counted that there was no room for it. Of one that was not,
    /// nothing is known.
    pub fn refused(&mut self, request: Request) {
        if let Some(count) = self.classes.get_mut(&request) {
            count.refused += self.scale;
        }
    }

    fn forget_the_rarest(&mut self) {
        let rarest = self
            .classes
            .iter()
            .min_by(|a, b| a.1.came.total_cmp(&b.1.came))
            .map(|(request, _)| *request);
        rarest.map(|request| self.classes.remove(&request));
    }

    /// The classes that need GPUs, each with which part of the requests for GPUs it is; they sum up
    /// to 1.
    pub(super) fn parts(&self) -> Vec<(Request, f64)> {
        self.wanted(0.0)
    }

    /// The same with requests that found no room counted so many times more; the parts are still
    /// those of what came, so they sum up to more than 1.
    pub(super) fn wanted(&self, times: f64) -> Vec<(Request, f64)> {
        let of_gpus = || self.classes.iter().filter(|(request, _)| request.total_milli() > 0);
        let sum: f64 = of_gpus().map(|(_, count)| count.came).sum();
        of_gpus()
            .map(|(request, count)| (*request, (count.came + times * count.refused) / sum))
            .collect()
    }
}

/// A [`RequestMix`] that learns, and the potential that goes with what it has learned.
///
/// It is told of each pod twice at most, however often a planner tries the pod:
/// [`Learner::observe`] when the pod comes, and [`Learner::refused`] when there is no room for it
/// for the first time. Either takes a look-up in a map.
///
/// A potential is worth computing again only when the mix has moved: often at first, then every few
/// hundred requests.
#[derive(Debug, Clone)]
pub struct Learner {
    mix: RequestMix,
    potential: Potential,
    observed: u64,
    /// At how many observations the next potential is due.
    due: u64,
}

/// The first potential learned is of so many requests, ...
const FIRST: u64 = 32;
/// ... and later ones come after an eighth more, and at least after so many.
const MOST_BETWEEN: u64 = 1024;

impl Learner {
    /// Begins with what is believed of the mix.
    #[must_use]
    pub fn new(mix: RequestMix) -> Self {
        let potential = Potential::new(&mix);
        Self { mix, potential, observed: 0, due: FIRST }
    }

    /// Counts a request. `true` = there is a new potential, and what was computed by the one before
    /// does not hold any more.
    pub fn observe(&mut self, request: Request) -> bool {
        self.mix.observe(request);
        self.observed += 1;
        let is_due = self.observed >= self.due;
        if is_due {
            self.potential = Potential::new(&self.mix);
            self.due = self.observed + (self.observed / 8).min(MOST_BETWEEN);
        }
        is_due
    }

    /// Says of a request that was observed that there was no room for it; once per pod, and not
    /// again when it is tried again. The potential stays what it is until [`Learner::observe`]
    /// says that there is a new one.
    pub fn refused(&mut self, request: Request) {
        self.mix.refused(request);
    }

    /// The potential that goes with what is known.
    #[must_use]
    pub fn potential(&self) -> &Potential {
        &self.potential
    }
}

impl Default for Learner {
    fn default() -> Self {
        Self::new(RequestMix::prior())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(cpu_milli: u64, share: u32) -> Request {
        Request { cpu_milli, gpus: 1, share: GpuMilli::new(share), types: GpuTypes::ANY }
    }

    fn part(mix: &RequestMix, of: Request) -> f64 {
        mix.parts().into_iter().find(|(request, _)| *request == of).map_or(0.0, |(_, part)| part)
    }

    #[test]
    fn what_comes_outweighs_the_prior_before_long() {
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
    fn a_request_for_which_there_was_no_room_counts_more_and_takes_nothing_from_the_others() {
        let (placed, refused) = (request(3000, 810), request(8000, 470));
        let mut mix = RequestMix::empty();
        [placed, refused].into_iter().for_each(|request| mix.observe(request));
        mix.refused(refused);
        mix.refused(request(1, 1));
        let wanted: Vec<(Request, i64)> = mix
            .wanted(30.0)
            .iter()
            .map(|&(request, part)| (request, (part * 100.0).round() as i64))
            .collect();
        assert_eq!(wanted, [(placed, 50), (refused, 1550)]);
        assert!((part(&mix, refused) - 0.5).abs() < 1e-3, "it came no more often");
    }

    #[test]
    fn pods_without_gpus_are_no_part_of_the_mix() {
        let mut mix = RequestMix::empty();
        mix.observe(Request { gpus: 0, share: GpuMilli::NONE, ..request(3000, 0) });
        mix.observe(request(3000, 810));
        assert_eq!(mix.parts(), [(request(3000, 810), 1.0)]);
    }

    #[test]
    fn the_number_of_classes_is_bounded() {
        let mut mix = RequestMix::empty();
        (0..5000).for_each(|cpu| mix.observe(request(cpu, 500)));
        assert_eq!(mix.parts().len(), MOST_CLASSES);
        assert!(part(&mix, request(4999, 500)) > 0.0, "the newest is kept");
    }

    #[test]
    fn a_potential_is_learned_often_at_first_and_seldom_later() {
        let mut learner = Learner::new(RequestMix::empty());
        let learned: Vec<u64> =
            (1..=20_000).filter(|_| learner.observe(request(8000, 500))).collect();
        assert_eq!(learned[0], FIRST);
        assert!(learned.windows(2).all(|pair| pair[1] - pair[0] <= MOST_BETWEEN));
        assert!(learned.len() < 80, "{}", learned.len());
        let mut mix = RequestMix::empty();
        (0..*learned.last().unwrap()).for_each(|_| mix.observe(request(8000, 500)));
        assert_eq!(*learner.potential(), Potential::new(&mix));
    }
}
