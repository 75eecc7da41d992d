//! A container with a cap, alone or beside others, and how well the cap is held.

use tessera_intercept_abi::ComputePolicy;

use crate::gpu::GpuSpec;
use crate::limiter::Limiter;
use crate::program::{Pattern, Program};
use crate::record::Record;
use crate::world::{Container, Host, World};
use crate::{MS, S};

/// Who else is on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Company {
    /// Nobody.
    Nobody,
    /// A container without a limit that launches kernels of 1 ms (10 ms beside kernels of 50 ms and
    /// more) all the time.
    Unlimited,
}

/// What is limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workload {
    /// How long its kernels run, ns.
    pub kernel: u64,
    /// When it waits for them.
    pub pattern: Pattern,
    /// Its processes.
    pub processes: usize,
    /// Who else is there.
    pub company: Company,
}

/// How a cap was held. Parts of a GPU are from 0 to 1.
#[derive(Debug, Clone, Copy)]
pub struct Judged {
    /// The cap, or what the same workload takes without one where that is less.
    pub expected: f64,
    /// What it had.
    pub had: f64,
    /// Largest error over windows of 1 s, or 20 kernels of each process where that is more.
    pub short: f64,
    /// Largest error over windows of 5 s, or 50 kernels of each process where that is more.
    pub long: f64,
    /// What the neighbour had of what was to be left to it. Changes of context are nobody's.
    pub neighbour: Option<f64>,
}

/// When limiters have seen enough.
const WARM: u64 = S;

impl Workload {
    /// The two windows over which its error says something: a kernel that runs cannot be stopped,
    /// so over less than some kernels no limiter can hold anything.
    #[must_use]
    pub fn windows(&self) -> (u64, u64) {
        let round = self.kernel * self.processes as u64;
        (S.max(20 * round), (5 * S).max(50 * round))
    }

    /// When its cap can be held: each process's first launches of a kernel run before anybody knows
    /// how long it takes (one at once, and another each time that patience ends), and are paid
    /// for afterwards.
    fn warm(&self, percent: u32) -> u64 {
        let processes = self.processes as u64;
        let first = (2 * processes * self.kernel / S + 1).ilog2() as u64 + 1;
        let paid = (first * processes + 1) * self.kernel * 100 / u64::from(percent);
        WARM.max(2 * paid).next_multiple_of(Record::STEP)
    }

    fn end(&self, percent: u32) -> u64 {
        self.warm(percent) + self.windows().1 + S
    }
}

/// Runs a workload under a limiter; answers what happened. The workload is container 0.
#[must_use]
pub fn run_alone_or_beside(
    workload: &Workload,
    limiter: Limiter,
    percent: u32,
    seed: u64,
) -> World {
    let mut world = World::new(GpuSpec::default(), Host::default(), seed);
    world.add(Container {
        program: Program::new(workload.kernel, workload.pattern),
        processes: workload.processes,
        limiter,
        percent,
        priority: 0,
    });
    if workload.company == Company::Unlimited {
        world.add(Container {
            program: Program::new(
                if workload.kernel < 50 * MS { MS } else { 10 * MS },
                Pattern::Async,
            ),
            processes: 1,
            limiter: Limiter::Tessera(ComputePolicy::None),
            percent: 0,
            priority: 0,
        });
    }
    world.run(workload.end(percent));
    world
}

/// What the workload takes without a limit.
#[must_use]
pub fn unlimited(workload: &Workload, seed: u64) -> f64 {
    let world = run_alone_or_beside(workload, Limiter::Nothing, 100, seed);
    world.record().part(0, workload.warm(100), workload.end(100))
}

/// Judges a limiter by a workload.
#[must_use]
pub fn judge(
    workload: &Workload,
    limiter: Limiter,
    percent: u32,
    unlimited: f64,
    seed: u64,
) -> Judged {
    let world = run_alone_or_beside(workload, limiter, percent, seed);
    let expected = unlimited.min(f64::from(percent) / 100.0);
    let (short, long) = workload.windows();
    let (warm, end) = (workload.warm(percent), workload.end(percent));
    let record = world.record();
    let neighbour = (workload.company != Company::Nobody)
        .then(|| record.part(1, warm, end) / (1.0 - expected - record.switching(warm, end)));
    Judged {
        expected,
        had: record.part(0, warm, end),
        short: record.worst(0, expected, short, warm),
        long: record.worst(0, expected, long, warm),
        neighbour,
    }
}
