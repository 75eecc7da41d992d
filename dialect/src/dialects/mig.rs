//! Profiles of MIG devices in the names of NVIDIA's device plugin (strategy `mixed`) and GKE.

/// Beginning of the resources of MIG devices, before the profile.
const PREFIX: &str = "nvidia.com/mig-";

/// Returns true if the resource is one of MIG devices.
pub(crate) fn is_resource(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// Returns the profile of a resource of MIG devices, such as `1g.10gb+me` of
/// `nvidia.com/mig-1g.10gb.me`: the plus sign is not allowed in names of resources. `None` if it
/// names no profile of a GPU instance.
#[must_use]
pub fn profile_of_resource(name: &str) -> Option<String> {
    let profile = name.strip_prefix(PREFIX)?.replacen("gb.", "gb+", 1);
    is_profile(&profile).then_some(profile)
}

/// Returns true if the text is a profile of a GPU instance: `1g.10gb`, with attributes behind a
/// plus or a minus sign (`1g.10gb+me`, `1g.24gb-me`). A profile of a smaller compute instance
/// (`1c.3g.20gb`) is none.
pub(crate) fn is_profile(text: &str) -> bool {
    let Some((size, attributes)) = text.split_once("gb") else { return false };
    let Some((slices, gigabytes)) = size.split_once("g.") else { return false };
    let is_number = |text: &str| {
        (1..=4).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_digit())
    };
    let has_name = |rest: &str| {
        (1..=20).contains(&rest.len())
            && rest.bytes().all(|byte| byte.is_ascii_lowercase() || b".+-".contains(&byte))
    };
    let are_attributes =
        attributes.is_empty() || attributes.strip_prefix(['+', '-']).is_some_and(has_name);
    is_number(slices) && is_number(gigabytes) && are_attributes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_are_read_from_names_of_resources() {
        let profile = |name: &str| profile_of_resource(&format!("nvidia.com/mig-{name}"));
        for same in ["1g.10gb", "7g.141gb", "1g.24gb-me"] {
            assert_eq!(profile(same).as_deref(), Some(same));
        }
        assert_eq!(profile("1g.10gb.me").as_deref(), Some("1g.10gb+me"));
        assert_eq!(profile("1g.24gb.me.all").as_deref(), Some("1g.24gb+me.all"));
        for other in ["", "1g", "1c.3g.20gb", "g.10gb", "1g.10gb.", "1g.10gb.M", "x1g.10gb"] {
            assert_eq!(profile(other), None, "{other}");
        }
        assert_eq!(profile_of_resource("nvidia.com/gpu"), None);
    }
}
