//! Models of what others do, as far as it is published.

use crate::MS;
use crate::limiter::Verdict;

/// Streaming multiprocessors and threads of each, as an H100 has them; blocks of every kernel.
const SMS: i64 = 132;
const THREADS: i64 = 2048;
const BLOCKS: i64 = 1320;
const POOL: i64 = SMS * THREADS * 32;
/// A process that has no tokens sleeps this long.
const NAP: u64 = 10 * MS;

/// HAMi-core: each process has its own pool, in blocks, refilled from the container's utilisation.
#[derive(Debug, Default)]
pub(crate) struct Hami {
    tokens: i64,
    share: i64,
}

impl Hami {
    /// Time between two looks.
    pub(crate) const PERIOD: u64 = 120 * MS;

    pub(crate) fn ask(&mut self, now: u64) -> Verdict {
        if self.tokens < 0 {
            return Verdict::WaitUntil(now + NAP);
        }
        self.tokens -= BLOCKS;
        Verdict::Go(None)
    }

    /// `delta()` and `change_token()`.
    pub(crate) fn look(&mut self, percent: u32, utilisation: f64) {
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

/// vgpu-manager: one pool for the container; less than 80 % of the limit used gives more, more than
/// 87.5 % of it a third.
#[derive(Debug, Default)]
pub(crate) struct Aimd {
    tokens: i64,
    share: i64,
    cooldown: u32,
}

impl Aimd {
    pub(crate) fn ask(&mut self, now: u64) -> Verdict {
        if self.tokens < 0 {
            return Verdict::WaitUntil(now + NAP);
        }
        self.tokens -= BLOCKS;
        Verdict::Go(None)
    }

    pub(crate) fn look(&mut self, percent: u32, utilisation: f64) {
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
