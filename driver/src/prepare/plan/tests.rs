use tessera_api::{
    gpu::{ComputeCapability, CudaVersion, Gpu, Health, Unpublished, UnpublishedReason},
    names::{ClaimName, ClaimUid, Namespace, PciBusId},
};

use super::*;
use crate::state::journal::{ComputeCap, ComputePriority};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn uuid(number: u8) -> GpuUuid {
    GpuUuid::new(format!("GPU-00000000-0000-0000-0000-0000000000{number:02}")).expect("a UUID")
}

fn gpu(number: u8, memory_bytes: u64) -> Gpu {
    Gpu {
        uuid: uuid(number),
        index: number.into(),
        minor: number.into(),
        product_name: "NVIDIA T4".into(),
        architecture: "Turing".into(),
        memory_bytes,
        cuda_compute_capability: ComputeCapability { major: 7, minor: 5 },
        driver_version: "580.95.05".into(),
        cuda_driver_version: CudaVersion { major: 13, minor: 0 },
        pci_bus_id: PciBusId::new(format!("0000:{number:02x}:00.0")).expect("an address"),
        pcie_root: None,
        numa_node: None,
        mig: None,
        health: Health::Healthy,
    }
}

fn share(index: usize, gpu: u8, memory_bytes: u64, cores_percent: u8) -> AllocatedShare {
    AllocatedShare {
        index,
        request: "gpu".parse().expect("a request"),
        pool: "node-a".parse().expect("a pool"),
        device: uuid(gpu).device_name(),
        share_id: None,
        memory_bytes,
        cores_percent,
        reserved: None,
        compute: Some(ComputeCap::None),
        limit_percent: None,
        priority: ComputePriority::default(),
        oversubscribe: false,
        mps: false,
    }
}

fn claim(uid: &str, shares: Vec<AllocatedShare>) -> PreparableClaim {
    PreparableClaim {
        uid: ClaimUid::new(uid).expect("a UID"),
        namespace: Namespace::new("ns").expect("a namespace"),
        name: ClaimName::new("claim").expect("a name"),
        shares,
        mig_devices: Vec::new(),
    }
}

fn inventory() -> Inventory {
    let lost = Unpublished {
        uuid: Some(uuid(9)),
        index: None,
        pci_bus_id: None,
        reason: UnpublishedReason::Lost,
    };
    Inventory::new(vec![gpu(0, 16 * GIB + MIB / 2), gpu(1, 16 * GIB)], vec![], vec![lost])
}

/// Returns the journal after these claims were prepared.
fn journal(claims: &[PreparableClaim]) -> Journal {
    let mut journal = Journal::default();
    for claim in claims {
        let Ok(PrepareDecision::Prepare(mut record)) = planned(claim, &journal) else {
            panic!("{claim:?}")
        };
        record.state = RecordState::Completed;
        journal.claims.insert(claim.uid.clone(), record);
    }
    journal
}

#[test]
fn shares_fit_up_to_the_whole_gpu() {
    let journal = journal(&[claim("a", vec![share(0, 0, 10 * GIB, 60)])]);
    let rest = claim("b", vec![share(0, 0, 6 * GIB, 40)]);
    assert!(matches!(planned(&rest, &journal), Ok(PrepareDecision::Prepare(_))));

    let more = claim("b", vec![share(0, 0, 6 * GIB + 1, 40)]);
    let error = planned(&more, &journal).expect_err("too much");
    assert!(
        matches!(error, PlanError::Memory { taken_bytes, .. } if taken_bytes == 10 * GIB),
        "{error}"
    );
    assert!(error.is_transient(), "the other claim may be unprepared");

    let more = claim("b", vec![share(0, 0, GIB, 41)]);
    let error = planned(&more, &journal).expect_err("too much");
    assert!(matches!(error, PlanError::Cores { asked: 41, taken: 60, .. }), "{error}");
}

#[test]
fn sums_shares_of_one_claim() {
    let twice = claim("a", vec![share(0, 0, 10 * GIB, 10), share(1, 0, 10 * GIB, 10)]);
    let error = planned(&twice, &Journal::default()).expect_err("too much");
    assert!(!error.is_transient(), "it never fits");
    let apart = claim("a", vec![share(0, 0, 10 * GIB, 10), share(1, 1, 10 * GIB, 10)]);
    assert!(planned(&apart, &Journal::default()).is_ok());
}

#[test]
fn refuses_mixed_sharing_modes() {
    let by_mps = |uid: &str| claim(uid, vec![AllocatedShare { mps: true, ..share(0, 0, GIB, 10) }]);
    let plain = |uid: &str| claim(uid, vec![share(0, 0, GIB, 10)]);
    let refused = |claim: &PreparableClaim, beside: PreparableClaim| {
        let error = planned(claim, &journal(&[beside])).expect_err("another sharing mode");
        assert!(error.is_transient(), "the other claim may be unprepared");
        error.to_string()
    };
    assert!(refused(&by_mps("b"), plain("a")).contains("in use with sharing Intercept"));
    assert!(refused(&plain("b"), by_mps("a")).contains("in use with sharing MPS"));
    assert!(planned(&by_mps("b"), &journal(&[by_mps("a")])).is_ok());
    let elsewhere = claim("a", vec![share(0, 1, GIB, 10)]);
    assert!(planned(&by_mps("b"), &journal(&[elsewhere])).is_ok());
}

/// Returns a share that may be oversubscribed.
const INSTALLED: Installed<'_> = Installed { library: "lib", default_compute: ComputeCap::Balance };

fn oversubscribed_share(index: usize, gpu: u8, memory_bytes: u64) -> AllocatedShare {
    AllocatedShare { oversubscribe: true, ..share(index, gpu, memory_bytes, 0) }
}

fn planned(claim: &PreparableClaim, journal: &Journal) -> Result<PrepareDecision, PlanError> {
    plan(claim, &inventory(), PublishedRatios::default(), journal, &INSTALLED)
}

fn planned_at_twice(
    claim: &PreparableClaim,
    journal: &Journal,
) -> Result<PrepareDecision, PlanError> {
    plan(claim, &inventory(), twice(), journal, &INSTALLED)
}

fn twice() -> PublishedRatios {
    PublishedRatios {
        memory: MemoryRatio::from_percent(200).expect("a ratio"),
        ..PublishedRatios::default()
    }
}

/// Returns the journal after these claims were prepared at 200 percent of the memory.
fn oversubscribed(claims: &[PreparableClaim]) -> Journal {
    let mut journal = Journal::default();
    for claim in claims {
        let decision = planned_at_twice(claim, &journal);
        let Ok(PrepareDecision::Prepare(record)) = decision else { panic!("{decision:?}") };
        journal.claims.insert(claim.uid.clone(), record);
    }
    journal
}

#[test]
fn oversubscribed_shares_fit_up_to_published_memory() {
    let journal = oversubscribed(&[claim("a", vec![oversubscribed_share(0, 0, 20 * GIB)])]);
    assert!(journal.claims.values().all(|record| record.shares[0].oversubscribe));
    let rest = claim("b", vec![oversubscribed_share(0, 0, 12 * GIB)]);
    assert!(planned_at_twice(&rest, &journal).is_ok());
    let more = claim("b", vec![oversubscribed_share(0, 0, 12 * GIB + MIB)]);
    let error = planned_at_twice(&more, &journal).expect_err("too much");
    assert!(
        matches!(error, PlanError::Memory { total_bytes, .. } if total_bytes == 32 * GIB),
        "{error}"
    );
    assert!(planned(&rest, &Journal::default()).is_ok(), "no need to");
}

#[test]
fn one_fixed_share_limits_gpu_to_its_memory() {
    let fixed = claim("a", vec![share(0, 0, 10 * GIB, 0)]);
    let beside = |uid, bytes| claim(uid, vec![oversubscribed_share(0, 0, bytes)]);
    for (first, second) in
        [(fixed.clone(), beside("b", 6 * GIB + MIB)), (beside("b", 6 * GIB + MIB), fixed.clone())]
    {
        let journal = oversubscribed(std::slice::from_ref(&first));
        let error = planned_at_twice(&second, &journal).expect_err("too much");
        assert!(
            matches!(error, PlanError::Memory { total_bytes, .. } if total_bytes == 16 * GIB),
            "{error}"
        );
        assert!(error.is_transient(), "the other claim may be unprepared");
    }
    let journal = oversubscribed(&[fixed]);
    assert!(planned_at_twice(&beside("b", 6 * GIB), &journal).is_ok());
}

#[test]
fn claim_that_never_fits_gets_advice() {
    // As after `--memory-percent` was lowered and the node restarted.
    let error =
        planned(&claim("a", vec![oversubscribed_share(0, 0, 17 * GIB)]), &Journal::default())
            .expect_err("too much");
    assert!(!error.is_transient() && error.to_string().contains("delete the pod"), "{error}");
}

#[test]
fn gpu_without_oversubscription_has_its_own_memory() {
    let mut old = inventory();
    old.gpus.iter_mut().for_each(|gpu| gpu.cuda_compute_capability.major = 5);
    let error = plan(
        &claim("a", vec![oversubscribed_share(0, 0, 17 * GIB)]),
        &old,
        twice(),
        &Journal::default(),
        &INSTALLED,
    );
    let error = error.expect_err("too much");
    assert!(
        matches!(error, PlanError::Memory { total_bytes, .. } if total_bytes == 16 * GIB),
        "{error}"
    );
}

#[test]
fn unpublished_fraction_of_mib_is_not_allocated() {
    let all = claim("a", vec![share(0, 0, 16 * GIB + MIB / 4, 0)]);
    assert!(planned(&all, &Journal::default()).is_err());
}

#[test]
fn started_claim_is_planned_again_and_counts() {
    let a = claim("a", vec![share(0, 0, 16 * GIB, 0)]);
    let mut journal = journal(std::slice::from_ref(&a));
    journal.claims.get_mut(&a.uid).expect("there").state = RecordState::Started;
    assert!(matches!(planned(&a, &journal), Ok(PrepareDecision::Prepare(_))));
    let b = claim("b", vec![share(0, 0, MIB, 0)]);
    assert!(matches!(planned(&b, &journal), Err(PlanError::Memory { .. })));
}

#[test]
fn prepared_claim_is_repeated_without_its_gpu() {
    let a = claim("a", vec![share(0, 0, GIB, 0)]);
    let journal = journal(std::slice::from_ref(&a));
    let decision = plan(
        &a,
        &Inventory::default(),
        PublishedRatios::default(),
        &journal,
        &Installed { library: "another library", ..INSTALLED },
    )
    .expect("repeated");
    assert_eq!(decision, PrepareDecision::Repeat(journal.claims[&a.uid].clone()));
}

#[test]
fn reallocated_claim_is_refused_until_unprepare() {
    let journal = journal(&[claim("a", vec![share(0, 0, GIB, 0)])]);
    let moved = claim("a", vec![share(0, 1, GIB, 0)]);
    let error = planned(&moved, &journal).expect_err("refused");
    assert_eq!(error, PlanError::PreparedDifferently);
    assert!(!error.is_transient(), "its Unprepare would wait for this Prepare");
}

#[test]
fn missing_gpu_is_refused_with_reason() {
    let error = planned(&claim("a", vec![share(0, 9, GIB, 0)]), &Journal::default());
    let error = error.expect_err("refused");
    assert!(error.to_string().contains("fallen off the bus"), "{error}");
    assert!(!error.is_transient());
    let unknown = planned(&claim("a", vec![share(0, 5, GIB, 0)]), &Journal::default());
    assert!(matches!(unknown, Err(PlanError::Gone { .. })));
}

#[test]
fn refuses_device_that_is_not_a_gpu() {
    let mut odd = share(0, 0, GIB, 0);
    odd.device = "nic-0".parse().expect("a device");
    assert!(matches!(
        planned(&claim("a", vec![odd]), &Journal::default()),
        Err(PlanError::NotAGpu { .. })
    ));
}

#[test]
fn cores_without_a_policy_get_the_default_of_their_first_prepare() {
    let unset = AllocatedShare { compute: None, ..share(0, 0, GIB, 30) };
    let a = claim("a", vec![unset]);
    let planned = planned(&a, &Journal::default()).expect("planned");
    let PrepareDecision::Prepare(record) = planned else { panic!("it is new: {planned:?}") };
    assert_eq!(record.shares[0].compute, ComputeCap::Balance);
    // Prepared by a driver with another default.
    let mut journal = journal(std::slice::from_ref(&a));
    let prepared = journal.claims.get_mut(&a.uid).expect("prepared");
    prepared.shares[0].compute = ComputeCap::None;
    let decision = plan(&a, &inventory(), PublishedRatios::default(), &journal, &INSTALLED);
    assert_eq!(decision, Ok(PrepareDecision::Repeat(journal.claims[&a.uid].clone())));
}
