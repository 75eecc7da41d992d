//! Decisions of one meter, step by step.

use core::sync::atomic::Ordering;
use std::collections::HashMap;

use proptest::prelude::*;
use tessera_intercept_abi::ComputePolicy;

use crate::compute::*;

const MS: u64 = 1_000_000;
const START: u64 = 1_000 * MS;

/// Number of repetitions; less by Miri, which takes some thousand times as long.
const fn times(usual: u64, by_miri: u64) -> u64 {
    if cfg!(miri) { by_miri } else { usual }
}

/// Events that were passed at times that the test sets.
#[derive(Default)]
struct Events(HashMap<u16, u64>);

impl EventTimer for Events {
    fn query_done(&mut self, marker: Marker) -> bool {
        self.0.contains_key(&marker.0)
    }

    fn elapsed_ns(&mut self, from: Marker, to: Marker) -> Option<i64> {
        Some(*self.0.get(&to.0)? as i64 - *self.0.get(&from.0)? as i64)
    }
}

/// A container with one process.
#[derive(Default)]
struct Alone {
    gain: Gain,
    page: ComputePage,
    slot: ComputeSlot,
    budget: LaunchBudget,
    meter: Meter,
    events: Events,
    /// The stream that it launches in.
    stream: usize,
    /// Since when its thread waits.
    waits: Option<u64>,
}

impl Alone {
    fn admit(&mut self, key: Key, now: u64) -> LaunchDecision {
        let since = *self.waits.get_or_insert(now);
        let decision = self.admit_in_thread(key, LaunchTime { since, now });
        if matches!(decision, LaunchDecision::Go(_)) {
            self.waits = None;
        }
        decision
    }

    fn admit_in_thread(&mut self, key: Key, time: LaunchTime) -> LaunchDecision {
        let view = ComputeView {
            budget: &self.budget,
            page: &self.page,
            slot: &self.slot,
            siblings: 0,
            has_siblings: false,
            published: None,
            gain: self.gain,
            entitlement: Entitlement::of_grant(ComputePolicy::Fixed, 50),
            slice_ns: 2 * MS,
        };
        let launch = Launch { key, context: 1, stream: self.stream };
        self.meter.admit(launch, &view, &mut self.events, time)
    }

    /// Launches a kernel that is measured, and has the GPU run it from then to then.
    fn run(&mut self, key: Key, from: u64, to: u64) {
        let LaunchDecision::Go(plan) = self.admit(key, from) else { panic!("it may go") };
        assert!(plan.pair.is_some(), "it is measured");
        self.submit(plan, from);
        self.pass(plan, from, to);
    }

    /// Submits a launch as planned, to a GPU that has other work.
    fn submit(&mut self, plan: LaunchPlan, at: u64) {
        let submission =
            Submission { before: at, launched: at, behind: at, was_idle: false, was_queued: true };
        self.meter.submitted(plan, submission);
    }

    /// Has the GPU run a launch that is measured from then to then.
    fn pass(&mut self, plan: LaunchPlan, from: u64, to: u64) {
        if let Some(pair) = plan.pair {
            self.events.0.insert(pair.before.0, from);
            self.events.0.insert(pair.behind.0, to);
        }
    }

    /// Launches a kernel if it may go, and has the GPU run it from then to then.
    fn run_if_admitted(&mut self, key: Key, now: u64, from: u64, to: u64) {
        if let LaunchDecision::Go(plan) = self.admit(key, now) {
            self.submit(plan, now);
            self.pass(plan, from, to);
        }
    }
}

/// A kernel of so many blocks of so many threads, in one dimension.
const fn flat(function: usize, blocks: u32, threads: u32) -> Key {
    Key::kernel(function, [blocks, 1, 1], [threads, 1, 1])
}

const KERNEL: Key = flat(0x1000, 64, 256);

#[test]
fn a_debt_is_paid_before_the_next_launch() {
    let mut alone = Alone::default();
    alone.run(KERNEL, START, START + 100 * MS);
    let LaunchDecision::Wait(waiting) = alone.admit(KERNEL, START + 100 * MS) else {
        panic!("in debt")
    };
    assert!(waiting.until_ns > START + 100 * MS);
    // Found after 100 ms, when the bucket is full: what was not foreseen, less the 10 ms of a full
    // bucket, at 50 %.
    assert!(matches!(alone.admit(KERNEL, START + 279 * MS), LaunchDecision::Wait(_)));
    assert!(matches!(alone.admit(KERNEL, START + 280 * MS), LaunchDecision::Go(_)));
    assert_eq!(alone.page.waits.load(Ordering::Relaxed), 1);
    assert_eq!(alone.page.waited_ns.load(Ordering::Relaxed), 180 * MS);
}

#[test]
fn unmeasured_kernel_is_launched_once_until_it_is_measured() {
    let mut alone = Alone::default();
    assert!(matches!(alone.admit(KERNEL, START), LaunchDecision::Go(_)));
    assert!(matches!(alone.admit(KERNEL, START + 1), LaunchDecision::Wait(_)));
    let another = flat(0x2000, 64, 256);
    assert!(matches!(alone.admit(another, START + 2), LaunchDecision::Go(_)), "others may go");
}

#[test]
fn a_launch_that_waits_for_one_that_waits_for_it_goes_in_the_end() {
    let mut alone = Alone::default();
    assert!(matches!(alone.admit(KERNEL, START), LaunchDecision::Go(_)));
    let goes = |now: &u64| matches!(alone.admit(KERNEL, START + now * MS), LaunchDecision::Go(_));
    let mut tries = (1..3_000).step_by(times(1, 143) as usize);
    assert_eq!(tries.find(goes), Some(1_002), "after a second");
}

/// A collective of two ranks in a process: the first kernel ends when the second has started.
#[test]
fn unmeasured_kernel_goes_in_another_stream() {
    let mut alone = Alone::default();
    assert!(matches!(alone.admit(KERNEL, START), LaunchDecision::Go(_)));
    alone.stream = 1;
    assert!(matches!(alone.admit(KERNEL, START + 1), LaunchDecision::Go(_)));
    assert!(matches!(alone.admit(KERNEL, START + 2), LaunchDecision::Wait(_)), "same stream");
}

/// Launches kernels of 100 us in stream 0, which are under way, and sets a debt of this GPU time.
fn in_debt(debt_ns: u64) -> (Alone, u64) {
    let mut alone = Alone::default();
    alone.run(KERNEL, START, START + MS / 10);
    let now = START + 100 * MS;
    let LaunchDecision::Go(_) = alone.admit(KERNEL, now) else { panic!("not in debt") };
    while alone.budget.charge(KERNEL).is_some() {}
    let LaunchDecision::Go(plan) = alone.admit(KERNEL, now) else { panic!("not in debt") };
    assert!(plan.pair.is_some(), "it takes a lease, and is measured");
    let due = now + Rate::from_percent(50).wall_ns(debt_ns);
    alone.page.due_ns.store(due, Ordering::Relaxed);
    while alone.budget.charge(KERNEL).is_some() {}
    (alone, now)
}

#[test]
fn launch_goes_in_debt_if_work_of_another_stream_may_wait_for_it() {
    let (mut alone, now) = in_debt(9 * MS);
    assert!(matches!(alone.admit(KERNEL, now), LaunchDecision::Wait(_)), "one stream");
    alone.stream = 1;
    assert!(matches!(alone.admit(KERNEL, now), LaunchDecision::Go(_)));
}

#[test]
fn one_launch_in_100_ms_goes_in_any_debt_beside_another_stream() {
    let (mut alone, now) = in_debt(10_000 * MS);
    let mut admitted = Vec::new();
    for at in 0..350 {
        alone.stream = 1 - alone.stream;
        while alone.budget.charge(KERNEL).is_some() {}
        if matches!(alone.admit(KERNEL, now + at * MS), LaunchDecision::Go(_)) {
            admitted.push(at);
        }
    }
    assert_eq!(admitted, [101, 203, 305]);
}

/// A kernel of a collective that spins while its peer waits.
#[test]
fn time_beyond_the_usual_is_charged_over_seconds() {
    let mut alone = Alone::default();
    let mut now = START;
    for length in [MS, MS, MS, 500 * MS] {
        alone.run(KERNEL, now, now + length);
        now += length + 100 * MS;
        let LaunchDecision::Go(_) = alone.admit(flat(0x2000, 1, 1), now) else { panic!("no debt") };
        while alone.budget.charge(KERNEL).is_some() {}
        alone.meter.leave(1);
        now += 100 * MS;
    }
    assert!(alone.slot.gpu_ns.load(Ordering::Relaxed) > 500 * MS, "in the ledger at once");
    assert!(alone.page.due_ns.load(Ordering::Relaxed) < now, "the bucket is not in debt");
    let mut admitted = 0;
    for at in 0..2_000 {
        while alone.budget.charge(KERNEL).is_some() {
            admitted += 1;
        }
        let now = now + at * MS;
        alone.waits = None;
        if let LaunchDecision::Go(plan) = alone.admit(KERNEL, now) {
            admitted += 1;
            alone.submit(plan, now);
            alone.pass(plan, now, now + MS);
        }
    }
    // At 50 % of 2 s, less most of the 500.
    assert!((550..750).contains(&admitted), "{admitted}");
}

#[test]
fn what_a_failed_launch_cost_comes_back() {
    let mut alone = Alone::default();
    alone.run(KERNEL, START, START + 3 * MS);
    alone.admit(KERNEL, START + 10 * MS);
    let before = alone.meter.outstanding();
    let LaunchDecision::Go(plan) = alone.admit(KERNEL, START + 11 * MS) else {
        panic!("not in debt")
    };
    alone.meter.failed(plan, &alone.budget);
    assert_eq!(alone.meter.outstanding(), before);
    assert!(alone.budget.charge(KERNEL).is_some(), "the next may have what the failed one paid");
}

#[test]
fn short_launches_are_paid_from_a_lease_and_every_lease_is_measured() {
    let mut alone = Alone::default();
    alone.run(KERNEL, START, START + 5_000);
    let (mut spent, mut admitted, launches) = (0, 0, times(1_000, 100));
    for at in 1..=launches {
        if alone.budget.charge(KERNEL).is_some() {
            spent += 1;
        } else {
            admitted += 1;
            let from = START + at * 20_000;
            alone.run_if_admitted(KERNEL, from, from, from + 5_000);
        }
    }
    assert!(admitted < 20 && spent > launches - 20, "{admitted} of {spent}");
}

#[test]
fn a_context_that_goes_takes_its_events_along_and_nothing_waits_for_them() {
    let mut alone = Alone::default();
    assert!(matches!(alone.admit(KERNEL, START), LaunchDecision::Go(_)));
    alone.meter.leave(1);
    assert!(matches!(alone.admit(KERNEL, START + 1), LaunchDecision::Go(_)));
}

/// Returns the number of these kernels with an estimate after each was measured once.
fn remembered(kernels: &[Key]) -> usize {
    let estimates = Estimates::new();
    kernels.iter().for_each(|key| estimates.learn(*key, 7_000));
    kernels.iter().filter(|key| estimates.known(**key).is_some()).count()
}

/// Possible address of the first function of a module.
const FUNCTIONS: usize = 0x7f00_5555_0000;

#[test]
fn kernels_that_differ_in_one_number_have_room_beside_one_another() {
    let with = |place: usize, number: u32| {
        let mut numbers = [1; 6];
        numbers[place] = number;
        let [x, y, z, width, height, depth] = numbers;
        Key::kernel(FUNCTIONS, [x, y, z], [width, height, depth])
    };
    for place in 0..6 {
        for stride in [1, 2, 8, 16, 32, 64, 128, 256, 512, 1024] {
            let kernels: Vec<_> = (1..=128).map(|number| with(place, number * stride)).collect();
            assert_eq!(remembered(&kernels), kernels.len(), "number {place}, every {stride}");
        }
    }
    for stride in [0x20, 0x40, 0x80, 0x100, 0x140, 0x180, 0x200, 0x400, 0x1000, 0x20_0000] {
        let function = |number: usize| flat(FUNCTIONS + number * stride, 64, 256);
        let kernels: Vec<_> = (0..128).map(function).collect();
        assert_eq!(remembered(&kernels), kernels.len(), "functions every {stride:#x}");
    }
}

#[test]
fn kernels_that_differ_in_several_numbers_have_room_beside_one_another() {
    for stride in [0x40, 0x100, 0x140, 0x1000] {
        for width in [1, 8, 32, 128] {
            let of_function =
                |function: usize| (1..=10).map(move |grid: u32| (function, grid * width));
            let kernels: Vec<_> = (0..30_usize)
                .flat_map(of_function)
                .map(|(function, width)| flat(FUNCTIONS + function * stride, width, 256))
                .collect();
            // Chance alone would have some sets of four meet a fifth.
            assert!(
                remembered(&kernels) * 100 >= kernels.len() * 95,
                "every {stride:#x}, grids of {width}"
            );
        }
    }
}

#[test]
fn tables_full_of_other_kernels_forget_the_oldest() {
    let estimates = Estimates::new();
    let last = times(100_000, 30) as usize;
    for function in 0..=last {
        estimates.learn(flat(function, 1, 1), 7_000);
    }
    let last = flat(last, 1, 1);
    assert_eq!(estimates.known(last), Some(7_000));
    // Thirty have room.
    assert!(cfg!(miri) || estimates.known(flat(0, 1, 1)).is_none());
    estimates.forget(last);
    assert_eq!(estimates.known(last), None);
}

#[test]
fn a_kernel_too_short_for_events_is_paid_from_leases_like_any_other() {
    let mut alone = Alone::default();
    alone.run(KERNEL, START, START);
    let (mut asked, launches) = (0, times(10_000, 200));
    for at in 0..launches {
        if alone.budget.charge(KERNEL).is_none() {
            asked += 1;
            let from = START + MS + at;
            alone.run_if_admitted(KERNEL, from, from, from);
        }
    }
    // Some 500 at a time, at a microsecond each.
    assert!((launches / 1_000..=1 + launches / 250).contains(&asked), "{asked}");
}

#[test]
fn a_kernel_that_may_be_another_is_believed_by_its_next_sample() {
    let estimates = Estimates::new();
    for _ in 0..9 {
        estimates.learn(KERNEL, 1_000);
    }
    estimates.invalidate();
    estimates.learn(KERNEL, 9_000);
    assert_eq!(estimates.known(KERNEL), Some(9_000));
}

#[test]
fn threads_that_pay_at_once_pay_once_each() {
    let mut alone = Alone::default();
    alone.run(KERNEL, START, START + 5_000);
    alone.admit(KERNEL, START + MS);
    let budget = &alone.budget;
    let paid: usize = std::thread::scope(|scope| {
        let payers: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    (0..times(1_000, 50)).filter(|_| budget.charge(KERNEL).is_some()).count()
                })
            })
            .collect();
        payers.into_iter().map(|payer| payer.join().expect("no panic")).sum()
    });
    // A lease of 375 to 625 us less what the first was thought to cost, in launches of 5 us.
    assert!((50..=125).contains(&paid), "{paid}");
    assert!(matches!(alone.admit(KERNEL, START + 5 * MS), LaunchDecision::Go(_)));
    assert_eq!(alone.meter.take_launches(), paid as u64);
}

#[test]
fn published_values_are_read_as_written_until_they_expire() {
    let page = PublishedPage::default();
    assert!(is_metered(&page), "before the host writes");
    assert_eq!(Published::read(&page, START), None, "never written");
    let published = Published {
        rate: Rate::from_percent(37),
        others: Contention::new(300),
        others_busy_ns: 12,
        stamp_ms: (START / MS) as u32,
        is_metered: false,
        scale: Rate::from_percent(62),
    };
    published.write(&page);
    assert_eq!(Published::read(&page, START), Some(published));
    assert!(!is_metered(&page), "also after it expires");
    assert_eq!(
        Published::read(&page, START - MS),
        Some(published),
        "a clock read before the host's"
    );
    assert!(Published::read(&page, START + 1_000 * MS).is_some());
    assert_eq!(Published::read(&page, START + 1_001 * MS), None);
}

proptest! {
    #[test]
    fn a_bucket_gives_no_more_than_its_rate_and_burst_and_one_last_launch(
        percent in 1_u32..100,
        steps in prop::collection::vec((0_u64..50 * MS, 1_u64..30 * MS), 1..times(200, 10) as usize),
    ) {
        let due = core::sync::atomic::AtomicU64::new(0);
        let (bucket, rate) = (Bucket::new(&due), Rate::from_percent(percent));
        let (mut now, mut taken) = (START, 0);
        for (pause, gpu_ns) in steps {
            now += pause;
            let before = taken;
            if bucket.take(now, 0, gpu_ns, rate).is_ok() {
                taken += gpu_ns;
            }
            let came_in = (now - START) * u64::from(percent) / 100 + BURST_GPU_NS;
            prop_assert!(before <= came_in + 30 * MS, "{before} of {came_in}");
            prop_assert!(taken > before || due.load(Ordering::Relaxed) > now);
        }
    }

    #[test]
    fn equal_turns_add_up_to_the_time(wall in 1_u64..10_000_000_000, others in 0_u64..64) {
        let contention = Contention::NONE.and(others);
        let all = contention.share_of(wall) * (others + 1);
        prop_assert!(all <= wall && wall - all <= others + 1);
    }

    #[test]
    fn nothing_a_tenant_writes_over_the_page_panics(
        words in prop::collection::vec(any::<u64>(), 6),
        now in any::<u64>(),
    ) {
        let mut alone = Alone::default();
        alone.page.due_ns.store(words[0], Ordering::Relaxed);
        alone.page.turn_at_ns.store(words[1], Ordering::Relaxed);
        alone.page.turn_ns.store(words[2], Ordering::Relaxed);
        alone.slot.busy_since_ns.store(words[3], Ordering::Relaxed);
        alone.slot.gpu_ns.store(words[4], Ordering::Relaxed);
        alone.slot.waiting_since_ns.store(words[5], Ordering::Relaxed);
        let now = now / 2;
        for at in 0..4 {
            alone.run_if_admitted(KERNEL, now + at * MS, at * MS, words[0] >> 1);
        }
    }
}

#[test]
fn a_kernel_that_never_ends_does_not_hold_up_those_in_other_streams() {
    let mut alone = Alone::default();
    assert!(matches!(alone.admit(KERNEL, START), LaunchDecision::Go(_)));
    let other = flat(0x2000, 1, 32);
    let (mut now, mut waited) = (START + MS, 0);
    for _ in 0..times(2_000, 10) {
        // Each is done before the next, and takes a twentieth of what is granted.
        loop {
            match alone.admit(other, now) {
                LaunchDecision::Wait(WaitUntil { until_ns, .. }) => {
                    waited += until_ns - now;
                    now = until_ns;
                }
                LaunchDecision::Go(plan) => {
                    alone.submit(plan, now);
                    alone.pass(plan, now, now + MS / 20);
                    break;
                }
            }
        }
        now += 2 * MS;
    }
    assert!(waited < 2_000 * MS, "waited for {} ms", waited / MS);
    assert!(alone.slot.gpu_ns.load(Ordering::Relaxed) > 0, "they are settled");
    // Ten are too few for a lease of many to be left over.
    assert!(cfg!(miri) || alone.budget.charge(other).is_some(), "they are learnt");
}

#[test]
fn what_ends_after_later_launches_is_charged_whole() {
    let mut alone = Alone::default();
    let LaunchDecision::Go(long) = alone.admit(KERNEL, START) else { panic!("the first may go") };
    alone.submit(long, START);
    let other = flat(0x2000, 1, 32);
    for at in [1, 101, 201, 301] {
        let now = START + at * MS;
        alone.run_if_admitted(other, now, now, now + MS);
    }
    alone.pass(long, START, START + 400 * MS);
    assert!(
        matches!(alone.admit(other, START + 500 * MS), LaunchDecision::Wait(_)),
        "400 ms are owed"
    );
    assert!(alone.slot.gpu_ns.load(Ordering::Relaxed) >= 400 * MS);
}

#[test]
fn kernels_that_were_measured_once_stay_known() {
    let kernels: Vec<_> =
        (0..times(200, 20) as usize).map(|function| flat(0x5000 + function * 64, 8, 128)).collect();
    let known = remembered(&kernels);
    assert!(known * 40 >= kernels.len() * 39, "{known} of {}, in 1024 places", kernels.len());
}

#[test]
fn a_launch_that_fails_after_its_context_went_is_not_undone_twice() {
    let mut alone = Alone::default();
    let LaunchDecision::Go(plan) = alone.admit(KERNEL, START) else { panic!("the first may go") };
    alone.meter.leave(1);
    // Another thread finds it gone.
    assert!(matches!(alone.admit(flat(0x2000, 1, 32), START + MS), LaunchDecision::Go(_)));
    let before = alone.meter.outstanding();
    alone.meter.failed(plan, &alone.budget);
    assert_eq!(alone.meter.outstanding(), before);
}

#[test]
fn other_threads_do_not_make_a_launch_wait_longer() {
    let mut alone = Alone::default();
    let short = flat(0x2000, 1, 32);
    alone.run(short, START, START + 1_000);
    assert!(matches!(alone.admit(KERNEL, START + MS), LaunchDecision::Go(_)));
    let since = START + 2 * MS;
    for at in (2..1_002).step_by(times(1, 250) as usize) {
        let asked = LaunchTime { since, now: START + at * MS };
        assert!(
            matches!(alone.admit_in_thread(KERNEL, asked), LaunchDecision::Wait(_)),
            "it is being measured"
        );
        assert!(
            matches!(alone.admit(short, START + at * MS), LaunchDecision::Go(_)),
            "others go on"
        );
    }
    let asked = LaunchTime { since, now: since + 1_001 * MS };
    assert!(
        matches!(alone.admit_in_thread(KERNEL, asked), LaunchDecision::Go(_)),
        "after a second of its own"
    );
}

#[test]
fn who_died_with_an_unknown_kernel_owes_a_second_at_most() {
    let mut alone = Alone::default();
    assert!(matches!(alone.admit(KERNEL, START), LaunchDecision::Go(_)));
    let (due, since, outstanding) =
        (&alone.page.due_ns, &alone.slot.busy_since_ns, &alone.slot.outstanding_ns);
    let found = START + 20_000 * MS;
    let owed =
        charge_exited(due, since, outstanding, found, Rate::from_percent(10), Contention::NONE);
    assert!(owed <= 1_000 * MS, "{} ms", owed / MS);
}

#[test]
fn charged_time_is_corrected_by_the_gain() {
    let owed_ns = |gain| {
        let mut alone = Alone { gain, ..Alone::default() };
        alone.run(KERNEL, START, START + 20 * MS);
        alone.admit(KERNEL, START + 20 * MS);
        alone.page.due_ns.load(Ordering::Relaxed).saturating_sub(START + 20 * MS)
    };
    let once = owed_ns(Gain::ONE);
    let twice = owed_ns(Gain::of(2, 1));
    // Half of the burst, 10 ms at 50 %, is used by the first 5 ms.
    assert!(twice > once + 30 * MS && twice < once + 50 * MS, "{once} {twice}");
}

#[test]
fn gains_expire_and_are_bounded() {
    let page = PublishedPage::default();
    assert_eq!(Gain::read(&page, START), Gain::ONE, "never written");
    let gain = Gain::of(3, 2);
    page.gain.store(gain.word(0, START), Ordering::Relaxed);
    assert_eq!(Gain::read(&page, START + 5_000 * MS), gain);
    assert_eq!(Gain::read(&page, START + 5_001 * MS), Gain::ONE);
    assert_eq!(Gain::read(&page, START - MS), gain, "a clock read before the host's");
    assert_eq!((Gain::of(1, 1_000), Gain::of(1_000, 1)), (Gain::LEAST, Gain::MOST));
    assert_eq!(Gain::of(0, 0), Gain::ONE);
    assert!(Gain::of(126, 100).is_large() && !Gain::of(80, 100).is_large());
}

/// Samples of NVML beside the uses.
#[derive(Clone, Copy)]
struct Reported {
    /// Age of the samples in ms.
    age: Option<u64>,
    /// True if other containers have work.
    is_contended: bool,
    /// Rate of the token bucket.
    rate: Rate,
    /// Time with work in ms.
    busy: u64,
}

/// Samples of an unknown age, of a container that always has work, alone on its GPU.
const OLD: Reported =
    Reported { age: None, is_contended: false, rate: Rate::from_percent(80), busy: 1_000 };
/// Samples with a time.
const YOUNG: Reported = Reported { age: Some(100), ..OLD };
/// [`YOUNG`], beside other containers.
const BESIDE_OTHERS: Reported = Reported { is_contended: true, ..YOUNG };

/// The gain after so many seconds of what NVML and the ledger say, in 1/1000 of the GPU.
fn gain_after(reported: Reported, seconds: u64, each: impl Fn(u64) -> (u64, u64)) -> Gain {
    let mut estimator = GainEstimator::default();
    for second in 0..seconds {
        let (charged, used) = each(second);
        let of = |thousandths| thousandths * MS;
        let (charged_ns, used_ns) = (of(charged), of(used));
        estimator.add(Interval {
            wall_ns: 1_000 * MS,
            age_ns: reported.age.map(of),
            charged_ns,
            busy_ns: of(reported.busy),
            outstanding_ns: 0,
            used_ns,
            processes: 1,
            is_contended: reported.is_contended,
            is_late: false,
            rate: reported.rate,
        });
    }
    estimator.gain()
}

/// Returns a gain in 1/1024.
const fn of_1024(gain: Gain) -> u16 {
    gain.word(0, 0) as u16
}

/// Returns true if there is nothing to correct but the margin beside others, 1/256.
const fn is_margin(gain: Gain) -> bool {
    matches!(of_1024(gain), 1_027 | 1_028)
}

#[test]
fn gain_approaches_the_quotient_of_used_and_charged_time() {
    let near = |gain: Gain, expected: u16| of_1024(gain).abs_diff(expected) <= 60;
    for (charged, used, expected) in [(300, 607, 2_048), (600, 295, 512)] {
        let gain = gain_after(OLD, 40, |_| (charged, used));
        assert!(near(gain, expected), "{gain:?}");
    }
    let first = of_1024(gain_after(OLD, 1, |_| (300, 600)));
    assert!(first < 1_500, "one reading changes little: {first}");
}

#[test]
fn what_nvml_cannot_resolve_does_not_change_the_gain() {
    for reported in [OLD, YOUNG] {
        assert_eq!(gain_after(reported, 40, |_| (100, 105)), Gain::ONE);
        assert_eq!(gain_after(reported, 40, |_| (100, 95)), Gain::ONE);
        assert_eq!(gain_after(reported, 40, |_| (0, 0)), Gain::ONE);
    }
    let random = |second: u64| (100, if second.is_multiple_of(2) { 95 } else { 105 });
    assert!(is_margin(gain_after(BESIDE_OTHERS, 40, random)));
    // Bursts that NVML reports one reading later than the ledger.
    let late = |second: u64| if second.is_multiple_of(2) { (800, 200) } else { (200, 800) };
    assert_eq!(gain_after(OLD, 40, late), Gain::ONE);
    assert_eq!(gain_after(OLD, 1, |_| (800, 0)), Gain::ONE, "NVML has not seen it yet");
}

#[test]
fn beside_others_half_a_percent_more_than_charged_counts() {
    let less = gain_after(BESIDE_OTHERS, 40, |_| (100, 95));
    assert!(is_margin(less), "half a percent less is not sure: {less:?}");
    let gain = of_1024(gain_after(BESIDE_OTHERS, 40, |_| (100, 105)));
    assert!((1_048..1_079).contains(&gain), "{gain}: 1.05 less random errors");
}

#[test]
fn gain_follows_young_samples_within_three_seconds() {
    let quotient = of_1024(Gain::of(600, 700));
    let [young, old] = [YOUNG, OLD].map(|of| of_1024(gain_after(of, 3, |_| (700, 600))));
    assert!(young <= quotient + 60 && old == 1_024, "{young} {old}, used by charged {quotient}");
    let [seen, beside] = [YOUNG, BESIDE_OTHERS].map(|of| gain_after(of, 1, |_| (800, 720)));
    assert_eq!(seen, Gain::ONE, "the last tenth of a second is not in the sample");
    assert!(is_margin(beside), "{beside:?}");
    let more = |second: u64| (700, if second == 0 { 650 } else { 730 });
    let [beside, alone] = [BESIDE_OTHERS, YOUNG].map(|of| of_1024(gain_after(of, 3, more)));
    assert!(beside > 1_040 && alone == 1_024, "{beside} {alone}");
}

#[test]
fn work_of_the_last_moment_changes_the_gain_little() {
    // The last fifth of every other second is full of work: half of it is in the next sample.
    let late = |second: u64| if second.is_multiple_of(2) { (200, 100) } else { (0, 100) };
    for reported in [YOUNG, BESIDE_OTHERS] {
        for seconds in [1, 2, 19, 20] {
            let gain = of_1024(gain_after(Reported { busy: 200, ..reported }, seconds, late));
            assert!(gain.abs_diff(1_024) <= 10, "{gain} after {seconds}");
        }
    }
}

/// All that the bucket allows in the tenth of a second since the sample is not in it.
#[test]
fn work_that_begins_after_a_pause_does_not_lower_the_gain() {
    let begins = |second: u64| if second == 60 { (35, 0) } else { (0, 0) };
    let of = |beside: Reported| Reported { rate: Rate::from_percent(25), busy: 100, ..beside };
    assert_eq!(gain_after(of(YOUNG), 61, begins), Gain::ONE);
    assert!(is_margin(gain_after(of(BESIDE_OTHERS), 61, begins)));
    let more = |second: u64| if second == 60 { (135, 0) } else { (0, 0) };
    assert!(gain_after(of(YOUNG), 61, more) < Gain::ONE, "the sample must have some of that");
}

/// Returns a tenant; `limit` in percent.
fn tenant(policy: ComputePolicy, cores: u32, limit: u32) -> Tenant {
    let entitlement = Entitlement::of_grant(policy, cores);
    Tenant { entitlement, limit: Rate::from_percent(limit), priority: 1 }
}

#[test]
fn launches_are_metered_only_where_a_limit_depends_on_them() {
    use ComputePolicy::{Balance, Fixed, None};
    let none = tenant(None, 0, 100);
    let whole = tenant(Fixed, 100, 100);
    let fixed = tenant(Fixed, 50, 100);
    let balance = tenant(Balance, 50, 100);
    let without_cores = tenant(Balance, 0, 100);
    let with_limit = tenant(Balance, 25, 50);
    for unlimited in [none, whole] {
        assert!(!needs_metering(&unlimited, [].iter()));
        assert!(!needs_metering(&unlimited, [none].iter()));
        for limited in [fixed, balance, without_cores, with_limit] {
            assert!(needs_metering(&unlimited, [none, limited].iter()), "beside {limited:?}");
        }
    }
    for balanced in [balance, without_cores] {
        assert!(!needs_metering(&balanced, [].iter()), "alone");
        assert!(needs_metering(&balanced, [none].iter()));
    }
    for limited in [fixed, with_limit] {
        assert!(needs_metering(&limited, [].iter()), "also alone: {limited:?}");
    }
    assert!(needs_metering(&whole, [whole].iter()), "guaranteed more than the GPU together");
    assert!(needs_metering(&none, [whole, whole].iter()), "others are");
}
