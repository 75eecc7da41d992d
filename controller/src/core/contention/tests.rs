use super::*;

fn claim(name: &str) -> ClaimUid {
    ClaimUid::new(name).unwrap()
}

#[test]
fn the_first_failure_costs_nothing_and_further_ones_ever_more_up_to_two_seconds() {
    let (mut contention, mut now) = (Contention::default(), Moment::START);
    contention.lost(&claim("c"), now);
    assert!(!contention.is_held(&claim("c"), now));
    for pause in [50, 100, 200, 400, 800, 1600, 2000, 2000] {
        contention.lost(&claim("c"), now);
        let until = now + Duration::from_millis(pause);
        assert_eq!(contention.next_wake(now), Some(until));
        assert!(contention.is_held(&claim("c"), until - Duration::from_millis(1)));
        assert!(!contention.is_held(&claim("c"), until));
        assert!(!contention.is_held(&claim("other"), now));
        now = until;
    }
    assert_eq!(contention.next_wake(now), None);
}

#[test]
fn a_write_that_goes_through_and_a_claim_that_is_gone_start_anew() {
    let (mut contention, now) = (Contention::default(), Moment::START);
    for forget in [Contention::won as fn(&mut Contention, &ClaimUid), |c, _| c.retain(|_| false)] {
        for _ in 0..10 {
            contention.lost(&claim("c"), now);
        }
        forget(&mut contention, &claim("c"));
        contention.lost(&claim("c"), now);
        assert!(!contention.is_held(&claim("c"), now));
    }
}
