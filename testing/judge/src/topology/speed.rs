//! Time of decisions, as CPU time of the deciding thread, which other load does not affect. Every
//! figure includes the read of that clock, a part of a microsecond.

use std::sync::Arc;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};
use tessera_allocator::topology::{DeviceSet, LinkMatrix};

use super::policies::{PolicyName, SetPolicy};
use crate::random::Random;

/// Times of one policy on one machine.
#[derive(Debug, Clone, Copy)]
pub struct Speed {
    /// Construction of the policy, which is computed once for equal machines.
    pub set_up: Duration,
    /// Median.
    pub p50: Duration,
    /// 99th percentile.
    pub p99: Duration,
    /// Maximum.
    pub longest: Duration,
}

/// Measures decisions for all request sizes from 1 to the whole machine in turn, with random free
/// GPUs. Every fourth decision is on the free machine.
pub fn measure(name: PolicyName, matrix: &Arc<LinkMatrix>, decisions: usize) -> Speed {
    let started = cpu_time();
    let mut policy = name.on(matrix, 1);
    let set_up = cpu_time() - started;
    let mut random = Random::new(42);
    let mut times: Vec<Duration> =
        (0..decisions.max(1)).map(|at| time(policy.as_mut(), matrix, at, &mut random)).collect();
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    Speed { set_up, p50: at(50), p99: at(99), longest: at(100) }
}

fn time(
    policy: &mut dyn SetPolicy,
    matrix: &LinkMatrix,
    at: usize,
    random: &mut Random,
) -> Duration {
    let size = 1 + at % matrix.len();
    let mut free = matrix.devices();
    if !at.is_multiple_of(4) {
        let mut taken = random.below(matrix.len() - size + 1);
        while taken > 0 {
            let devices: Vec<usize> = free.iter().collect();
            free = free - DeviceSet::one(devices[random.below(devices.len())]);
            taken -= 1;
        }
    }
    let started = cpu_time();
    std::hint::black_box(policy.choose(std::hint::black_box(free), size));
    cpu_time() - started
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}
