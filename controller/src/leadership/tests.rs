use super::*;

fn lease(holder: &str, seconds: i32) -> LeaseSpec {
    LeaseSpec {
        holder_identity: Some(holder.to_owned()),
        lease_duration_seconds: Some(seconds),
        ..Default::default()
    }
}

#[test]
fn lease_is_taken_over_once_unchanged_for_its_duration() {
    let seen = Instant::now();
    let at = |seconds| {
        decide(Some(&lease("other", 15)), "me", seen, seen + Duration::from_secs(seconds))
    };
    assert_eq!(at(0), LeaseDecision::Wait);
    assert_eq!(at(14), LeaseDecision::Wait);
    assert_eq!(at(15), LeaseDecision::TakeOver);
}

#[test]
fn lease_without_holder_is_taken_at_once() {
    let now = Instant::now();
    assert_eq!(decide(None, "me", now, now), LeaseDecision::Create);
    assert_eq!(decide(Some(&LeaseSpec::default()), "me", now, now), LeaseDecision::TakeFirst);
    assert_eq!(decide(Some(&lease("", 1)), "me", now, now), LeaseDecision::TakeFirst);
    let released = LeaseSpec { renew_time: Some(MicroTime(Timestamp::UNIX_EPOCH)), ..lease("", 1) };
    assert_eq!(decide(Some(&released), "me", now, now), LeaseDecision::Acquire);
    assert_eq!(decide(Some(&lease("me", 15)), "me", now, now), LeaseDecision::Renew);
}
