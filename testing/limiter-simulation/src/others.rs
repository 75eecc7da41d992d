//! Models of other limiters, as far as they are published.

use crate::MS;
use crate::limiter::LimiterDecision;

/// Streaming multiprocessors and threads of each on an H100; blocks of every kernel.
const SMS: i64 = 132;
const THREADS: i64 = 2048;
const BLOCKS: i64 = 1320;
const POOL: i64 = SMS * THREADS * 32;
/// Sleep of a process without tokens.
const SLEEP: u64 = 10 * MS;

/// Admits a launch and takes its tokens, or delays it while there are none.
fn try_launch(tokens: &mut i64, now: u64) -> LimiterDecision {
    if *tokens < 0 {
        return LimiterDecision::RetryAt(now + SLEEP);
    }
    *tokens -= BLOCKS;
    LimiterDecision::Admit(None)
}

/// HAMi-core: each process has its own pool of blocks, adjusted by the container's utilisation.
#[derive(Debug, Default)]
pub(crate) struct Hami {
    tokens: i64,
    share: i64,
}

impl Hami {
    /// Time between two adjustments.
    pub(crate) const PERIOD: u64 = 120 * MS;

    pub(crate) fn decide(&mut self, now: u64) -> LimiterDecision {
        try_launch(&mut self.tokens, now)
    }

    /// Adjusts the share, as `delta()` and `change_token()`.
    pub(crate) fn adjust(&mut self, percent: u32, utilisation: f64) {
        let (limit, used) = (i64::from(percent), (utilisation * 100.0).round() as i64);
        let off = (limit - used).abs().max(5);
        let mut step = SMS * SMS * THREADS * off / 2560;
        if off > limit / 2 {
            step = step * off * 2 / (limit + 1);
        }
        self.share =
            if used <= limit { (self.share + step).min(POOL) } else { (self.share - step).max(0) };
        self.tokens = (self.tokens + self.share).min(POOL);
    }
}

/// vgpu-manager: one pool for the container. Usage below 80 % of the limit increases the share,
/// above 87.5 % decreases it, above the limit divides it by three.
#[derive(Debug, Default)]
pub(crate) struct Aimd {
    tokens: i64,
    share: i64,
    cooldown: u32,
}

impl Aimd {
    pub(crate) fn decide(&mut self, now: u64) -> LimiterDecision {
        try_launch(&mut self.tokens, now)
    }

    pub(crate) fn adjust(&mut self, percent: u32, utilisation: f64) {
        let limit = f64::from(percent) / 100.0;
        self.cooldown = self.cooldown.saturating_sub(1);
        if utilisation > limit && self.cooldown == 0 {
            self.share /= 3;
            self.cooldown = 3;
        } else if utilisation > limit * 0.875 && self.cooldown == 0 {
            self.share = self.share * 7 / 8;
            self.cooldown = 3;
        } else if utilisation < limit * 0.8 {
            self.share = (self.share + POOL / 256).min(POOL);
        }
        self.tokens = (self.tokens + self.share).min(self.share.max(BLOCKS));
    }
}
