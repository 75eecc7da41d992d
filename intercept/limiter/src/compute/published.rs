//! Values that the host publishes to a container about a GPU.

use core::sync::atomic::Ordering;

use tessera_intercept_abi::PublishedPage;

use crate::compute::{Contention, Rate};

/// One reading of a [`PublishedPage`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Rate of a container under `Balance`.
    pub rate: Rate,
    /// Contention by others over the host's last interval.
    pub others: Contention,
    /// Busy ns of the others, as of `stamp_ms`.
    pub others_busy_ns: u64,
    /// Time of writing in monotonic ms, the low 32 bits.
    pub stamp_ms: u32,
    /// False if launches need neither charges nor measurement.
    pub is_metered: bool,
    /// Part of the guaranteed cores that the container is entitled to; [`Rate::FULL`]: all.
    pub scale: Rate,
}

impl Published {
    /// Bit of the word for launches that are not metered: rates are below it.
    const UNMETERED: u64 = 1 << 15;

    /// Age at which it expires: the host's driver does not run.
    pub const STALE_MS: u32 = 1_000;

    /// Returns [`is_metered`] of the word of a page.
    #[must_use]
    pub const fn word_is_metered(word: u64) -> bool {
        word & Self::UNMETERED == 0
    }

    /// Returns the word of a page, with launches metered.
    #[must_use]
    pub const fn metered(word: u64) -> u64 {
        word & !Self::UNMETERED
    }

    /// Returns its age.
    #[must_use]
    pub const fn age_ms(&self, now: u64) -> u32 {
        age_ms(self.stamp_ms, now)
    }

    /// Returns the busy ns of the others by now, extrapolated from the last interval.
    #[must_use]
    pub fn others_busy_by(&self, now: u64) -> u64 {
        let since_ns = u64::from(self.age_ms(now)) * 1_000_000;
        self.others_busy_ns.saturating_add(since_ns * u64::from(self.others.in_256ths()) / 256)
    }

    /// Returns the words of the page: `word`, which is to be written last, `others_busy_ns` and
    /// `scale`.
    #[must_use]
    pub fn words(&self) -> [u64; 3] {
        let unmetered = if self.is_metered { 0 } else { Self::UNMETERED };
        let word = u64::from(self.rate.hundredths())
            | unmetered
            | u64::from(self.others.in_256ths().min(0xffff)) << 16
            | u64::from(self.stamp_ms) << 32;
        [word, self.others_busy_ns, u64::from(self.scale.hundredths())]
    }

    /// Writes it to a page, as the host does. The words are written one after the other: a
    /// reader between them is off by one interval, which is within the error of the values.
    pub fn write(&self, page: &PublishedPage) {
        let [word, others_busy_ns, scale] = self.words();
        page.scale.store(scale, Ordering::Relaxed);
        page.others_busy_ns.store(others_busy_ns, Ordering::Relaxed);
        page.word.store(word, Ordering::Release);
    }

    /// Reads a page. `None` if the host never wrote it, or not for [`Published::STALE_MS`].
    #[must_use]
    pub fn read(page: &PublishedPage, now: u64) -> Option<Self> {
        // The word was written last.
        let word = page.word.load(Ordering::Acquire);
        let others_busy_ns = page.others_busy_ns.load(Ordering::Relaxed);
        Self::of_words([word, others_busy_ns, page.scale.load(Ordering::Relaxed)], now)
    }

    /// Returns the values of a page's [words](Self::words), as [`Published::read`].
    #[must_use]
    pub fn of_words([word, others_busy_ns, scale]: [u64; 3], now: u64) -> Option<Self> {
        let hundredths = (word & (Self::UNMETERED - 1)) as u16;
        let published = Self {
            rate: Rate::new(hundredths),
            others: Contention::new((word >> 16 & 0xffff) as u32),
            others_busy_ns,
            stamp_ms: (word >> 32) as u32,
            is_metered: Self::word_is_metered(word),
            scale: match scale {
                0 => Rate::FULL,
                scale => Rate::new(u16::try_from(scale).unwrap_or(u16::MAX)),
            },
        };
        (hundredths != 0 && published.age_ms(now) <= Self::STALE_MS).then_some(published)
    }
}

/// Returns true if launches must be charged and measured.
///
/// The value does not expire: the host publishes that launches are not metered only if no other
/// share of the GPU needs it, and without the host's driver no share is added.
#[must_use]
#[inline]
pub fn is_metered(page: &PublishedPage) -> bool {
    Published::word_is_metered(page.word.load(Ordering::Relaxed))
}

/// Returns the age of a time stamp in ms. One of the last minute before it would be written comes
/// from a clock that was read after `now`: its age is 0.
pub(crate) const fn age_ms(stamp_ms: u32, now: u64) -> u32 {
    const TOLERANCE_MS: u32 = 60_000;
    let age = ((now / 1_000_000) as u32).wrapping_sub(stamp_ms);
    if age > u32::MAX - TOLERANCE_MS { 0 } else { age }
}
