//! Compute rate and contention that the driver publishes to containers.

mod fakes;

use std::{
    fs::{self, File},
    mem::offset_of,
    os::unix::fs::FileExt,
    time::{Duration, Instant},
};

use fakes::{
    kubelet::Kubelet,
    ledger::share,
    node::{Node, asked, configured},
};
use serde_json::json;
use tessera_api::slice::CoresRatio;
use tessera_driver::driver::{Driver, DriverSettings};
use tessera_intercept_abi::{
    LedgerPage, PublishedPage, SlotPage, grant_offset,
    ledger::{HEADER_LEN, LOCK_OFFSET, SLOT_LIVE},
};
use tessera_intercept_limiter::compute::{Published, Rate};

/// Prepares a claim with 30 % of the only GPU, with this policy and priority.
async fn prepare(node: &Node, kubelet: &Kubelet, name: &str, policy: &str, priority: &str) {
    let compute = json!({"compute": {"policy": policy, "priority": priority}});
    node.api.put_claim(configured(name, &[(0, 2, 30)], &compute));
    kubelet.prepare(asked(name)).await.expect("prepared");
}

fn monotonic_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns the values that a container reads in its grant.
fn published(node: &Node, name: &str) -> Option<Published> {
    let grant = fs::read(node.paths().grant(&share(name))).expect("a grant");
    let word = |at: usize| {
        let at = grant_offset::PUBLISHED + at;
        u64::from_le_bytes(grant[at..at + 8].try_into().expect("eight bytes")).into()
    };
    let page = PublishedPage {
        word: word(offset_of!(PublishedPage, word)),
        others_busy_ns: word(offset_of!(PublishedPage, others_busy_ns)),
        scale: word(offset_of!(PublishedPage, scale)),
        ..PublishedPage::default()
    };
    Published::read(&page, monotonic_ns())
}

/// Lets a process of the claim be busy from now on.
fn works(node: &Node, name: &str) {
    let ledger =
        File::options().write(true).open(node.paths().ledger(&share(name))).expect("a ledger");
    let word = |at: usize, value: u64| {
        ledger.write_all_at(&value.to_le_bytes(), (HEADER_LEN + at) as u64).expect("written");
    };
    word(offset_of!(SlotPage, compute.done_by_ns), u64::MAX);
    word(offset_of!(SlotPage, compute.busy_since_ns), monotonic_ns());
    word(0, u64::from(SLOT_LIVE));
}

/// Waits until a container reads such values.
async fn until(node: &Node, name: &str, so: impl Fn(&Published) -> bool) -> Published {
    let begun = Instant::now();
    loop {
        let now = published(node, name);
        match now.filter(&so) {
            Some(published) => return published,
            None => assert!(begun.elapsed() < Duration::from_secs(300), "{name} reads {now:?}"),
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn guarantees_above_the_gpu_scale_down_while_all_work() {
    let node = Node::with_gpus(1);
    let cores_ratio = CoresRatio::from_percent(200).expect("a ratio");
    let settings = DriverSettings { cores_ratio, ..node.settings() };
    let driver = node.start_as(settings).await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    for name in ["a", "b"] {
        node.api.put_claim(configured(
            name,
            &[(0, 2, 100)],
            &json!({"compute": {"policy": "Fixed"}}),
        ));
        kubelet.prepare(asked(name)).await.expect("prepared");
    }
    works(&node, "a");
    until(&node, "a", |read| read.scale == Rate::FULL && read.is_metered).await;
    works(&node, "b");
    for name in ["a", "b"] {
        until(&node, name, |read| read.scale == Rate::from_percent(50)).await;
    }
    driver.stop().await;
}

async fn begin(node: &Node) -> (Driver, Kubelet) {
    let driver = node.start().await;
    let kubelet = Kubelet::register(&node.path("kubelet")).await;
    (driver, kubelet)
}

#[tokio::test]
async fn balance_gets_spare_compute_until_others_work() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = begin(&node).await;
    prepare(&node, &kubelet, "a", "Balance", "Normal").await;
    prepare(&node, &kubelet, "b", "Fixed", "Normal").await;
    until(&node, "a", |read| read.rate == Rate::FULL && read.others.is_negligible()).await;
    // The other share has 30 % and is always busy.
    works(&node, "b");
    let crowded = until(&node, "a", |read| read.rate == Rate::from_percent(70)).await;
    until(&node, "a", |read| read.others.in_256ths() > 200).await;
    let later = until(&node, "a", |read| read.others_busy_ns > crowded.others_busy_ns).await;
    assert!(later.others.in_256ths() < 400, "one process: {later:?}");
    driver.stop().await;
}

#[tokio::test]
async fn share_prepared_again_is_published_again() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = begin(&node).await;
    prepare(&node, &kubelet, "a", "Balance", "Normal").await;
    until(&node, "a", |read| read.rate == Rate::FULL).await;
    // Mostly between two rounds of the scheduler.
    for _ in 0..10 {
        kubelet.unprepare(asked("a")).await.expect("unprepared");
        prepare(&node, &kubelet, "a", "Balance", "Normal").await;
    }
    let begun = monotonic_ns();
    until(&node, "a", |read| read.rate == Rate::FULL && monotonic_ns() > begun + 2_000_000_000)
        .await;
    driver.stop().await;
}

#[tokio::test]
async fn process_killed_while_waiting_requests_nothing() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = begin(&node).await;
    prepare(&node, &kubelet, "a", "Balance", "Normal").await;
    prepare(&node, &kubelet, "b", "Balance", "Normal").await;
    let ledger = File::options()
        .read(true)
        .write(true)
        .open(node.paths().ledger(&share("b")))
        .expect("a ledger");
    let waiting = (HEADER_LEN + offset_of!(SlotPage, compute.waiting_since_ns)) as u64;
    ledger.write_all_at(&monotonic_ns().to_le_bytes(), waiting).expect("written");
    let lock = nix::libc::flock {
        l_type: nix::libc::F_WRLCK as nix::libc::c_short,
        l_whence: nix::libc::SEEK_SET as nix::libc::c_short,
        l_start: LOCK_OFFSET as nix::libc::off_t,
        l_len: 1,
        l_pid: 0,
    };
    nix::fcntl::fcntl(&ledger, nix::fcntl::FcntlArg::F_OFD_SETLK(&lock)).expect("locked");
    ledger.write_all_at(&u64::from(SLOT_LIVE).to_le_bytes(), HEADER_LEN as u64).expect("written");
    // It requests more than its 30 %, so it gets half of the spare compute.
    until(&node, "a", |read| read.rate < Rate::FULL).await;
    drop(ledger);
    until(&node, "a", |read| read.rate == Rate::FULL).await;
    driver.stop().await;
}

#[tokio::test]
async fn spare_compute_goes_to_high_priority() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = begin(&node).await;
    for (name, priority) in [("a", "High"), ("b", "Low")] {
        prepare(&node, &kubelet, name, "Balance", priority).await;
        works(&node, name);
    }
    until(&node, "a", |read| read.rate == Rate::from_percent(70)).await;
    until(&node, "b", |read| read.rate == Rate::from_percent(30)).await;
    driver.stop().await;
}

#[tokio::test]
async fn restarted_driver_continues_from_published_values() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = begin(&node).await;
    prepare(&node, &kubelet, "a", "Balance", "Normal").await;
    prepare(&node, &kubelet, "b", "Fixed", "Normal").await;
    works(&node, "b");
    let before = until(&node, "a", |read| read.others_busy_ns > 50_000_000).await;
    driver.stop().await;
    let stopped = published(&node, "a");
    let driver = node.start().await;
    let after =
        until(&node, "a", |read| stopped.is_none_or(|stopped| read.stamp_ms != stopped.stamp_ms))
            .await;
    assert!(after.others_busy_ns >= before.others_busy_ns, "{before:?} {after:?}");
    driver.stop().await;
}

#[tokio::test]
async fn corrupt_ledger_does_not_affect_other_shares() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = begin(&node).await;
    prepare(&node, &kubelet, "a", "Balance", "Normal").await;
    prepare(&node, &kubelet, "b", "Balance", "Normal").await;
    works(&node, "b");
    until(&node, "a", |read| read.rate < Rate::FULL).await;
    fs::write(node.paths().ledger(&share("b")), "").expect("written");
    until(&node, "a", |read| read.rate == Rate::FULL && read.others.is_negligible()).await;
    // Work of a thousand processes is not accepted.
    let ledger = node.paths().ledger(&share("b"));
    let mut content = vec![0; tessera_intercept_abi::LEDGER_LEN];
    content[..24].copy_from_slice(&tessera_intercept_abi::ledger::initial());
    fs::write(&ledger, &content).expect("written");
    let written = (monotonic_ns() / 1_000_000) as u32;
    // The second round after that has read the earlier values.
    let first = until(&node, "a", |read| read.stamp_ms > written).await;
    until(&node, "a", |read| read.stamp_ms > first.stamp_ms).await;
    let offset = offset_of!(LedgerPage, compute.past_busy_ns) as u64;
    let file = File::options().write(true).open(&ledger).expect("a ledger");
    file.write_all_at(&u64::MAX.to_le_bytes(), offset).expect("written");
    let read = until(&node, "a", |read| !read.others.is_negligible()).await;
    assert!(read.others.in_256ths() <= 16 * 256, "{read:?}");
    driver.stop().await;
}

#[tokio::test]
async fn published_rate_does_not_exceed_the_limit_of_the_claim() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = begin(&node).await;
    let compute = json!({"compute": {"limit": 50}});
    node.api.put_claim(configured("a", &[(0, 2, 30)], &compute));
    kubelet.prepare(asked("a")).await.expect("prepared");
    until(&node, "a", |read| read.rate == Rate::from_percent(50) && read.others.is_negligible())
        .await;
    driver.stop().await;
}

/// Returns true if the container's launches are metered.
fn is_metered(node: &Node, name: &str) -> bool {
    let grant = fs::read(node.paths().grant(&share(name))).expect("a grant");
    let at = grant_offset::PUBLISHED + offset_of!(PublishedPage, word);
    Published::word_is_metered(u64::from_le_bytes(
        grant[at..at + 8].try_into().expect("eight bytes"),
    ))
}

async fn until_metered(node: &Node, name: &str, expected: bool) {
    let begun = Instant::now();
    while is_metered(node, name) != expected {
        assert!(begun.elapsed() < Duration::from_secs(300), "{name}: {expected}");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn share_without_neighbours_is_not_metered_until_one_is_limited() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = begin(&node).await;
    prepare(&node, &kubelet, "a", "None", "Normal").await;
    until_metered(&node, "a", false).await;
    // Neither is limited.
    prepare(&node, &kubelet, "b", "None", "Normal").await;
    until_metered(&node, "b", false).await;
    assert!(!is_metered(&node, "a"));
    prepare(&node, &kubelet, "c", "Balance", "Normal").await;
    for name in ["a", "b", "c"] {
        until(&node, name, |read| read.is_metered).await;
    }
    kubelet.unprepare(asked("a")).await.expect("unprepared");
    kubelet.unprepare(asked("b")).await.expect("unprepared");
    until_metered(&node, "c", false).await;
    driver.stop().await;
}

/// A container must not stay unlimited by making its ledger unreadable.
#[tokio::test]
async fn share_with_a_corrupt_ledger_is_metered_beside_a_limited_one() {
    let node = Node::with_gpus(1);
    let (driver, kubelet) = begin(&node).await;
    prepare(&node, &kubelet, "a", "Balance", "Normal").await;
    until_metered(&node, "a", false).await;
    let ledger = File::options().write(true).open(node.paths().ledger(&share("a")));
    ledger.expect("a ledger").write_all_at(&[0; 8], 0).expect("written");
    prepare(&node, &kubelet, "b", "Fixed", "Normal").await;
    until_metered(&node, "a", true).await;
    driver.stop().await;
}
