//! How long kernels take, by what was seen.

/// What is launched: a kernel with its grid, or a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Key(u64);

impl Key {
    /// A kernel, by its function and how many blocks of how many threads.
    #[must_use]
    pub const fn kernel(function: usize, blocks: u64, threads: u32) -> Self {
        Self(mix(mix(function as u64) ^ blocks).wrapping_add(threads as u64) | 1)
    }

    /// An executable graph: one unit.
    #[must_use]
    pub const fn graph(exec: usize) -> Self {
        Self(mix(exec as u64 ^ 0x6772_6170_6800_0000) | 1)
    }
}

/// Spreads addresses over all bits (the finaliser of `SplitMix64`).
const fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}

const SETS: usize = 256;
const WAYS: usize = 4;
/// Samples after which a mean forgets.
const MEMORY: u64 = 7;
/// What a kernel is taken to cost before any kernel was measured.
const FIRST_NS: u64 = 100_000;
/// What a kernel never seen is taken to cost at most: it is measured at once, and settled.
const STRANGER_NS: u64 = 2_000_000;

#[derive(Debug, Clone, Copy)]
struct Entry {
    /// 0: none.
    key: u64,
    mean_ns: u64,
    /// Samples that the mean stands for, up to [`MEMORY`].
    samples: u64,
    /// Mean of what it had by equal turns.
    even_ns: u64,
}

/// Averages of the last samples, by key: 32 KiB, all zeroes when new.
#[derive(Debug)]
pub struct Estimates {
    sets: [[Entry; WAYS]; SETS],
    /// Average of the first samples of keys; 0: none yet.
    stranger_ns: u64,
}

impl Default for Estimates {
    fn default() -> Self {
        Self::new()
    }
}

impl Estimates {
    /// Knows nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self { sets: [[Entry { key: 0, mean_ns: 0, samples: 0, even_ns: 0 }; WAYS]; SETS], stranger_ns: 0 }
    }

    /// GPU-ns that it takes, where it was measured.
    #[must_use]
    #[inline]
    pub fn known(&self, key: Key) -> Option<u64> {
        self.set(key).iter().find(|entry| entry.key == key.0).map(|entry| entry.mean_ns)
    }

    /// GPU-ns for what was never measured: as others were when they were new, but no more than 2 ms.
    #[must_use]
    pub const fn stranger(&self) -> u64 {
        match self.stranger_ns {
            0 => FIRST_NS,
            STRANGER_NS.. => STRANGER_NS,
            ns => ns,
        }
    }

    /// Learns from a sample. The least known of a full set makes room, and all others of it age.
    pub fn learn(&mut self, key: Key, gpu_ns: u64) {
        let set = &mut self.sets[key.0 as usize >> 8 & (SETS - 1)];
        if let Some(entry) = set.iter_mut().find(|entry| entry.key == key.0) {
            entry.mean_ns = blend(entry.mean_ns, gpu_ns, entry.samples);
            entry.samples = (entry.samples + 1).min(MEMORY);
            return;
        }
        for entry in set.iter_mut() {
            entry.samples /= 2;
        }
        if let Some(entry) = set.iter_mut().min_by_key(|entry| entry.samples) {
            *entry = Entry { key: key.0, mean_ns: gpu_ns, samples: 1, even_ns: 0 };
        }
        self.stranger_ns = if self.stranger_ns == 0 {
            gpu_ns.max(1)
        } else {
            blend(self.stranger_ns, gpu_ns, MEMORY).max(1)
        };
    }

    /// Learns what a kernel had by equal turns, and answers the mean of it.
    pub fn learn_even(&mut self, key: Key, gpu_ns: u64) -> u64 {
        let set = &mut self.sets[key.0 as usize >> 8 & (SETS - 1)];
        let Some(entry) = set.iter_mut().find(|entry| entry.key == key.0) else { return gpu_ns };
        entry.even_ns = if entry.even_ns == 0 { gpu_ns } else { blend(entry.even_ns, gpu_ns, MEMORY) };
        entry.even_ns
    }

    /// Forgets, since the address may be another's from now on.
    pub fn forget(&mut self, key: Key) {
        let set = &mut self.sets[key.0 as usize >> 8 & (SETS - 1)];
        for entry in set.iter_mut().filter(|entry| entry.key == key.0) {
            *entry = Entry { key: 0, mean_ns: 0, samples: 0, even_ns: 0 };
        }
    }

    fn set(&self, key: Key) -> &[Entry; WAYS] {
        &self.sets[key.0 as usize >> 8 & (SETS - 1)]
    }
}

/// The mean of a new sample and of a mean that stands for so many.
const fn blend(mean: u64, sample: u64, samples: u64) -> u64 {
    if sample >= mean {
        mean + (sample - mean) / (1 + samples)
    } else {
        mean - (mean - sample) / (1 + samples)
    }
}
