//! Certificates over years: at every time the served one is one that a client trusts.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use rustls::RootCertStore;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tessera_admission::certificates::{
    BACKDATE, CertificateError, Certificates, LIFETIME, TRUST_DELAY,
};

const NAME: &str = "tessera-webhook.tessera-system.svc";
const DAY: i64 = 24 * 3600;
/// A day in 2026.
const START: i64 = 1_790_000_000;

fn renewed(current: Option<&Certificates>, published: Option<&str>, now: i64) -> Certificates {
    let renewed = Certificates::renewed(current, NAME, published, now).unwrap();
    let kept = renewed.unwrap_or_else(|| current.unwrap().clone());
    let read = Certificates::from_secret(&kept.to_secret()).unwrap();
    assert_eq!(read, kept, "the Secret keeps all");
    read
}

/// Verifies the served certificate as a client with this caBundle, at this time.
fn verify(served: &Certificates, ca_bundle: &str, name: &str, now: i64) -> Result<(), String> {
    let mut roots = RootCertStore::empty();
    for authority in CertificateDer::pem_slice_iter(ca_bundle.as_bytes()) {
        roots.add(authority.unwrap()).unwrap();
    }
    let provider = Arc::new(default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map_err(|error| error.to_string())?;
    let key = served.certified_key().unwrap();
    let time = UnixTime::since_unix_epoch(Duration::from_secs(now.try_into().unwrap()));
    let name = ServerName::try_from(name.to_owned()).unwrap();
    verifier
        .verify_server_cert(key.end_entity_cert().unwrap(), &key.cert[1..], &name, &[], time)
        .map(drop)
        .map_err(|error| error.to_string())
}

#[test]
fn a_served_certificate_is_trusted_through_all_rotations() {
    let mut stored = renewed(None, None, START);
    // Replicas and kube-apiserver are one tick behind.
    let (mut served, mut published) = (stored.clone(), stored.ca_bundle());
    let (mut keys, mut bundles) = (1, 1);
    let tick = 6000;
    for now in (START..START + 365 * DAY).step_by(usize::try_from(tick).unwrap()) {
        verify(&served, &published, NAME, now).unwrap_or_else(|e| panic!("{now}: {e}"));
        let next = renewed(Some(&stored), Some(&published), now);
        keys += usize::from(next.validity() != stored.validity());
        bundles += usize::from(next.ca_bundle() != stored.ca_bundle());
        (served, published) = (stored.clone(), stored.ca_bundle());
        stored = next;
    }
    assert!((6..=7).contains(&keys), "rotations in a year: {keys}");
    assert!(bundles > keys, "an authority is added, and removed once it has expired: {bundles}");
}

#[test]
fn the_next_certificate_is_not_served_before_it_is_trusted() {
    let first = renewed(None, None, START);
    let due = START + LIFETIME - LIFETIME / 3 + 1;
    let second = renewed(Some(&first), Some(&first.ca_bundle()), due);
    assert_eq!(second.validity(), first.validity(), "still served");
    assert!(second.ca_bundle().starts_with(&first.ca_bundle()) && second != first);
    // The configuration was not written.
    let late = due + 10 * DAY;
    assert_eq!(renewed(Some(&second), Some(&first.ca_bundle()), late), second);
    let early = due + TRUST_DELAY - 1;
    assert_eq!(renewed(Some(&second), Some(&second.ca_bundle()), early), second);
    let third = renewed(Some(&second), Some(&second.ca_bundle()), due + TRUST_DELAY);
    assert_ne!(third.validity(), first.validity());
    verify(&third, &second.ca_bundle(), NAME, due + TRUST_DELAY).unwrap();
}

#[test]
fn an_expired_certificate_is_replaced_at_once() {
    let first = renewed(None, None, START);
    let late = START + 2 * LIFETIME;
    assert!(verify(&first, &first.ca_bundle(), NAME, late).is_err());
    let second = renewed(Some(&first), Some(&first.ca_bundle()), late);
    verify(&second, &second.ca_bundle(), NAME, late).unwrap();
    assert!(verify(&second, &first.ca_bundle(), NAME, late).is_err());
}

#[test]
fn a_certificate_of_a_clock_that_was_ahead_is_replaced() {
    let ahead = renewed(None, None, START + 400 * DAY);
    assert!(verify(&ahead, &ahead.ca_bundle(), NAME, START).is_err());
    let right = renewed(Some(&ahead), Some(&ahead.ca_bundle()), START);
    verify(&right, &right.ca_bundle(), NAME, START).unwrap();
}

#[test]
fn a_client_whose_clock_is_a_day_behind_trusts_a_new_one() {
    let new = renewed(None, None, START);
    verify(&new, &new.ca_bundle(), NAME, START - BACKDATE).unwrap();
    assert!(verify(&new, &new.ca_bundle(), NAME, START - BACKDATE - 1).is_err());
}

#[test]
fn a_certificate_for_another_service_is_replaced() {
    let other = Certificates::renewed(None, "other.default.svc", None, START).unwrap().unwrap();
    assert!(verify(&other, &other.ca_bundle(), NAME, START).is_err());
    let own = renewed(Some(&other), Some(&other.ca_bundle()), START);
    verify(&own, &own.ca_bundle(), NAME, START).unwrap();
    assert!(verify(&own, &own.ca_bundle(), "other.default.svc", START).is_err());
}

#[test]
fn errors_of_a_secret_name_the_key() {
    let good = renewed(None, None, START).to_secret();
    let read = |key: &str, value: Option<&str>| {
        let mut data = good.clone();
        data.remove(key);
        let bytes = value.map(|value| k8s_openapi::ByteString(value.as_bytes().to_vec()));
        data.extend(bytes.map(|bytes| (key.to_owned(), bytes)));
        Certificates::from_secret(&data).and_then(|read| read.certified_key().map(drop))
    };
    assert!(
        read("tls.crt", good.get("tls.crt").map(|b| std::str::from_utf8(&b.0).unwrap())).is_ok()
    );
    for key in ["tls.crt", "tls.key"] {
        for value in [None, Some("")] {
            let text = read(key, value).unwrap_err().to_string();
            assert!(text.starts_with(&format!("data[{key}]: ")), "{text}");
        }
    }
    let other = renewed(None, None, START).to_secret();
    let foreign = std::str::from_utf8(&other["tls.key"].0).unwrap();
    let error = read("tls.key", Some(foreign)).unwrap_err();
    assert!(matches!(error, CertificateError::Invalid { key: "tls.key", .. }), "{error}");
}
