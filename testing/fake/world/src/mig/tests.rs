use super::*;

fn fill(table: &MigTable, profile: u32) -> (MigState, Vec<u32>) {
    let mut gpu = MigState::default();
    let mut starts = Vec::new();
    while let Ok(serial) = gpu.create_gpu_instance(table, profile, None) {
        starts.push(gpu.gpu_instance(serial).expect("an instance").start);
    }
    (gpu, starts)
}

#[test]
fn every_row_fits_as_often_as_the_table_says() {
    let mut rows = 0;
    for model in MigTable::models() {
        let table = MigTable::of_model(model).expect("a table");
        for profile in &table.profiles {
            rows += 1;
            let (full, starts) = fill(&table, profile.id);
            assert_eq!(starts.len(), profile.max as usize, "{model} {}", profile.name);
            assert_eq!(full.remaining(&table, profile), 0, "{model} {}", profile.name);
        }
    }
    assert_eq!(rows, 47);
}

#[test]
fn every_mix_that_nvidia_documents_fits() {
    let table = MigTable::of_model("h100-80gb").expect("a table");
    let mixes: [&[(u32, u32)]; 5] = [
        &[(5, 0), (9, 4)],
        &[(9, 0), (14, 4), (19, 6)],
        &[(14, 0), (14, 2), (14, 4), (19, 6)],
        &[(15, 0), (15, 2), (15, 4), (15, 6)],
        &[(5, 0), (20, 4), (19, 5), (15, 6)],
    ];
    for mix in mixes {
        let mut gpu = MigState::default();
        for (profile, start) in mix {
            gpu.create_gpu_instance(&table, *profile, Some(*start)).expect("it fits");
        }
    }
}

#[test]
fn taken_slices_and_engines_are_insufficient() {
    let table = MigTable::of_model("a100-80gb").expect("a table");
    let mut gpu = MigState::default();
    gpu.create_gpu_instance(&table, 9, Some(4)).expect("it fits");
    let refused = |gpu: &mut MigState, profile, start| {
        gpu.create_gpu_instance(&table, profile, Some(start)).expect_err("it does not fit")
    };
    assert_eq!(refused(&mut gpu, 19, 5), MigError::InsufficientResources);
    assert_eq!(refused(&mut gpu, 0, 0), MigError::InsufficientResources);
    assert_eq!(refused(&mut gpu, 14, 1), MigError::InvalidArgument);
    assert_eq!(refused(&mut gpu, 99, 0), MigError::NotSupported);
    gpu.create_gpu_instance(&table, 20, Some(0)).expect("it fits");
    assert_eq!(refused(&mut gpu, 20, 1), MigError::InsufficientResources, "media engines");
}

#[test]
fn ids_are_used_again_and_uuids_are_not() {
    const GPU: &str = "GPU-503ccb1c-855f-48b6-a68b-160e414b825a";
    let table = MigTable::of_model("a30").expect("a table");
    let mut gpu = MigState::default();
    let first = gpu.create_gpu_instance(&table, 5, Some(2)).expect("it fits");
    let uuid = gpu.create_compute_instance(&table, GPU, first, 2).expect("it fits");
    assert_eq!(uuid.len(), 40);
    assert_eq!(
        gpu.create_compute_instance(&table, GPU, first, 1),
        Err(MigError::InsufficientResources)
    );
    assert_eq!(gpu.destroy_gpu_instance(first), Err(MigError::InUse));
    let id = gpu.gpu_instance(first).expect("an instance").id;
    gpu.destroy_compute_instance(&uuid).expect("it is idle");
    gpu.destroy_gpu_instance(first).expect("it is empty");
    let second = gpu.create_gpu_instance(&table, 5, Some(2)).expect("it fits");
    assert_eq!(gpu.gpu_instance(second).expect("an instance").id, id);
    assert_ne!(gpu.create_compute_instance(&table, GPU, second, 2), Ok(uuid));
    assert_eq!(gpu.destroy_gpu_instance(first), Err(MigError::NotFound), "the handle is stale");
}
