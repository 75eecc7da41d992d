//! Comparison of the table of costs with a model.

use std::collections::HashMap;

use proptest::prelude::*;

use super::{Cost, Table};

fn empty() -> Table {
    // SAFETY: all zeroes is an empty table, by its contract.
    unsafe { std::mem::zeroed() }
}

fn cost(bytes: u64, context: usize) -> Cost {
    Cost { bytes, context, gpu: 0, holders: 1 }
}

proptest! {
    #[test]
    fn table_behaves_as_a_map(
        steps in prop::collection::vec((0_u8..4, 0_u64..60, 1_usize..4), 0..400),
    ) {
        let (mut table, mut model) = (empty(), HashMap::new());
        for (step, number, context) in steps {
            // Like the driver's pointers, keys are far apart and have equal low bits; some collide.
            let key = 0x7f00_0000_0000 + number * 0x20_0000;
            match step {
                0 | 1 => {
                    prop_assert!(table.make_room());
                    prop_assert_eq!(table.put(key, cost(number, context)), model.insert(key, cost(number, context)));
                }
                2 => prop_assert_eq!(table.remove(key), model.remove(&key)),
                _ => {
                    let (mut gone, mut place, mut last) = (0, 0, 0);
                    let goes = |_, cost: &Cost| cost.context == context;
                    while let Some(cost) = table.remove_next(&mut place, goes) {
                        prop_assert!(place >= last, "one pass");
                        last = place;
                        prop_assert_eq!(cost.context, context);
                        gone += 1;
                    }
                    let before = model.len();
                    model.retain(|_, cost| cost.context != context);
                    prop_assert_eq!(gone, before - model.len());
                }
            }
            for number in 0..60 {
                let key = 0x7f00_0000_0000 + number * 0x20_0000;
                prop_assert_eq!(table.get(key).copied(), model.get(&key).copied());
            }
        }
    }
}

#[test]
fn table_grows_and_shrinks_without_loss() {
    let mut table = empty();
    for number in 1..=100_000_u64 {
        assert!(table.make_room());
        assert_eq!(table.put(number * 512, cost(number, 1)), None);
    }
    for number in (1..=100_000_u64).rev() {
        assert_eq!(table.remove(number * 512), Some(cost(number, 1)));
    }
    assert_eq!(table.remove(512), None);
    assert!(table.get(0).is_none() && table.remove(0).is_none());
}
