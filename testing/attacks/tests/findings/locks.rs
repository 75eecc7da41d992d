//! H2: many locks on a ledger, of which the driver asks the kernel who holds which.

use std::fs::File;
use std::mem::offset_of;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::ResourceExt;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde_json::{Value, json};
use tessera_attacks::bounds;
use tessera_attacks::objects;
use tessera_attacks::processes::Process;
use tessera_e2e::inventory::DRIVER;
use tessera_intercept_abi::ledger::{HEADER_LEN, LOCK_OFFSET, SLOT_LEN, SLOT_LIVE, SLOTS};
use tessera_intercept_abi::{GRANT_FILE, LEDGER_FILE, SlotPage, grant_offset};
use tessera_test_support::test_name;

use crate::harness::{Harness, NEIGHBOUR, TENANT, TIMEOUT};

/// Four times those of the finding.
const LOCKS: usize = 200_000;

/// Time for which rounds are counted.
const WINDOW: Duration = Duration::from_secs(10);

/// Rounds per second of a GPU, of which the driver makes 20: on an idle machine, and on a busy one.
const ROUNDS_PER_SECOND: [f64; 2] = [18.0, 5.0];

/// Most CPU time of the driver, in cores. It needs 0.03; with such a ledger it has taken one.
const CORES: f64 = 0.15;

/// Returns devices with a share of the GPU with that index on the node with H100.
fn balanced(index: usize) -> Value {
    let mut exactly = objects::exactly("2Gi");
    exactly["deviceClassName"] = format!("h100.{DRIVER}").into();
    let expression = format!("device.attributes['{DRIVER}'].index == {index}");
    exactly["selectors"] = json!([objects::selector(&expression)]);
    let parameters = json!({
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig",
        "compute": {"policy": "Balance"},
    });
    json!({
        "requests": [{"name": "gpu", "exactly": exactly}],
        "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
    })
}

/// Returns the file of a claim's only share, once the driver has prepared it.
async fn share_file(driver: &Process, kind: &str, claim: &ResourceClaim, file: &str) -> PathBuf {
    let state = driver.path(driver.argument("--state-dir").unwrap());
    let directory = state.join(kind).join(claim.uid().unwrap());
    let begun = Instant::now();
    loop {
        let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        let mut paths = entries.map(|entry| entry.path().join(file));
        if let Some(path) = paths.find(|path| path.is_file()) {
            return path;
        }
        assert!(begun.elapsed() < TIMEOUT, "{} has no {file}", directory.display());
        tokio::task::yield_now().await;
    }
}

fn record_lock(file: &File, kind: libc::c_int, from: usize, length: usize) {
    let lock = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: (LOCK_OFFSET + from as u64) as libc::off_t,
        l_len: length as libc::off_t,
        l_pid: 0,
    };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
}

/// Places locks that the kernel compares with each query. A lock is compared with all others when
/// it is placed; one that is split from the begin of the list is not, so this takes milliseconds
/// and not half a minute.
fn place_locks(ledger: &PathBuf, count: usize) -> [File; 2] {
    let [others, slots] =
        [0; 2].map(|_| File::options().read(true).write(true).open(ledger).unwrap());
    record_lock(&others, libc::F_WRLCK, SLOTS, 2 * count);
    for number in (1..count).rev() {
        record_lock(&others, libc::F_UNLCK, SLOTS + 2 * number - 1, 1);
    }
    // Every other slot, as locks of their own behind the others in the kernel's list.
    for slot in (0..SLOTS).step_by(2) {
        record_lock(&slots, libc::F_WRLCK, slot, 1);
    }
    [others, slots]
}

/// Marks all slots as processes that wait.
fn claim_slots(ledger: &File) {
    for slot in 0..SLOTS {
        let at = (HEADER_LEN + slot * SLOT_LEN) as u64;
        let waiting = at + offset_of!(SlotPage, compute.waiting_since_ns) as u64;
        ledger.write_all_at(&1u64.to_le_bytes(), waiting).unwrap();
        ledger.write_all_at(&u64::from(SLOT_LIVE).to_le_bytes(), at).unwrap();
    }
}

/// Rounds of the driver, as the containers with these grants see them.
#[derive(Debug)]
struct Rounds {
    per_second: Vec<f64>,
    cores: f64,
}

async fn count_rounds(driver: &Process, grants: &[PathBuf]) -> Rounds {
    let published = |grant: &PathBuf| {
        let mut word = [0; 8];
        let file = File::open(grant).unwrap();
        file.read_exact_at(&mut word, grant_offset::PUBLISHED as u64).unwrap();
        word
    };
    let (cpu, begun) = (driver.usage().unwrap().cpu_s, Instant::now());
    let mut last: Vec<_> = grants.iter().map(published).collect();
    let mut counts = vec![0.0; grants.len()];
    let mut samples = tokio::time::interval(Duration::from_millis(5));
    while begun.elapsed() < WINDOW {
        samples.tick().await;
        for (number, grant) in grants.iter().enumerate() {
            let word = published(grant);
            if word != last[number] {
                counts[number] += 1.0;
                last[number] = word;
            }
        }
    }
    let seconds = begun.elapsed().as_secs_f64();
    Rounds {
        per_second: counts.iter().map(|count| count / seconds).collect(),
        cores: (driver.usage().unwrap().cpu_s - cpu) / seconds,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_on_a_ledger_delay_no_round() {
    let Some(harness) = Harness::start(test_name!()).await else { return };
    let driver = harness.driver();
    let attacker = harness.pod(TENANT, "locks", &balanced(0)).await;
    let mut grants = Vec::new();
    for (name, index) in [("same-gpu", 0), ("other-gpu", 1)] {
        let claim = harness.pod(NEIGHBOUR, name, &balanced(index)).await;
        grants.push(share_file(&driver, "grants", &claim, GRANT_FILE).await);
    }
    let ledger = share_file(&driver, "ledgers", &attacker, LEDGER_FILE).await;
    harness.report("before:", count_rounds(&driver, &grants).await);

    let placing = Instant::now();
    let locks = place_locks(&ledger, LOCKS);
    claim_slots(&locks[0]);
    harness.report("locks placed in", placing.elapsed());
    let rounds = count_rounds(&driver, &grants).await;
    harness.report("with the locks:", &rounds);
    let least = ROUNDS_PER_SECOND[usize::from(!bounds::is_strict())];
    assert!(rounds.per_second.iter().all(|rounds| *rounds >= least), "{rounds:?}");
    assert!(rounds.cores < CORES, "{rounds:?}");
    drop(locks);
    harness.check_neighbour(Duration::from_secs(2)).await;
    harness.cluster.stop().await.unwrap();
}
