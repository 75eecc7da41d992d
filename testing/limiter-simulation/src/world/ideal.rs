//! Waits that a limiter without error would not need.

use tessera_intercept_limiter::compute::BURST_GPU_NS;

/// The tokens that a container would have if its limiter knew the GPU time of each kernel at once.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Ideal {
    at: u64,
    ran: u64,
    /// GPU-ns; negative: a debt.
    tokens: i64,
    /// The time since which a launch waits although there is no debt.
    waits_since: Option<u64>,
    pub(super) longest: u64,
}

impl Ideal {
    /// Observes the time of a container, and whether a launch waits.
    pub(super) fn observe(&mut self, now: u64, ran: u64, percent: u32, waits: bool) {
        let earned = (now - self.at) * u64::from(percent) / 100;
        let tokens = self.tokens + earned as i64 - (ran - self.ran) as i64;
        let since = self.waits_since.filter(|_| self.tokens > 0);
        self.longest = self.longest.max(since.map_or(0, |since| now - since));
        (self.at, self.ran, self.tokens) = (now, ran, tokens.min(BURST_GPU_NS as i64));
        self.waits_since = (waits && self.tokens > 0).then(|| since.unwrap_or(now));
    }
}
