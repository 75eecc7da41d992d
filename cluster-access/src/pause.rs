//! Pauses between attempts of a watch.

use std::time::Duration;

use kube::runtime::utils::Backoff;

/// Pauses that begin anew by time alone, as the inner ones do by themselves ([`ResetTimerBackoff`], [`DefaultBackoff`]).
///
/// A list that is refused again and again begins each time with an event (`Init`), on which a watch's pauses are reset, and both of the
/// above pass that on (kube-runtime 5.0.0): a kind that is not served, or not permitted, was listed for ever after the shortest pause.
///
/// [`ResetTimerBackoff`]: kube::runtime::utils::ResetTimerBackoff
/// [`DefaultBackoff`]: kube::runtime::watcher::DefaultBackoff
#[derive(Debug, Default)]
pub struct ByTime<B>(pub B);

impl<B: Backoff> Iterator for ByTime<B> {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next()
    }
}

impl<B: Backoff> Backoff for ByTime<B> {
    fn reset(&mut self) {}
}
