//! The profiles that are built in, from `passes/plan/clusters`.

use crate::cluster::Cluster;

const PROFILES: &[(&str, &str)] = &[
    ("dgx-a100-40gb", include_str!("../../clusters/dgx-a100-40gb.toml")),
    ("dgx-a100-80gb", include_str!("../../clusters/dgx-a100-80gb.toml")),
    ("a100-80gb-800g", include_str!("../../clusters/a100-80gb-800g.toml")),
    ("dgx-h100", include_str!("../../clusters/dgx-h100.toml")),
    ("p5-h100", include_str!("../../clusters/p5-h100.toml")),
    ("a3-mega-h100", include_str!("../../clusters/a3-mega-h100.toml")),
    ("dgx-h200", include_str!("../../clusters/dgx-h200.toml")),
    ("dgx-b200", include_str!("../../clusters/dgx-b200.toml")),
    ("gb200-nvl72", include_str!("../../clusters/gb200-nvl72.toml")),
    ("mi300x", include_str!("../../clusters/mi300x.toml")),
    ("l20-pcie", include_str!("../../clusters/l20-pcie.toml")),
    ("l40s-pcie", include_str!("../../clusters/l40s-pcie.toml")),
    ("rtx-4090-pcie", include_str!("../../clusters/rtx-4090-pcie.toml")),
    ("a100-pcie", include_str!("../../clusters/a100-pcie.toml")),
    ("cpu", include_str!("../../clusters/cpu.toml")),
];

/// The names of the built-in profiles, in the order to list them.
pub fn names() -> Vec<&'static str> {
    PROFILES.iter().map(|&(name, _)| name).collect()
}

/// The built-in profile called `name`.
pub fn builtin(name: &str) -> Option<Cluster> {
    let &(name, text) = PROFILES.iter().find(|&&(n, _)| n == name)?;
    Some(Cluster::parse(name, text).expect("a test parses every built-in profile"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_parses_and_bears_its_file_name() {
        for (name, text) in PROFILES {
            let cluster = Cluster::parse(name, text).unwrap_or_else(|d| panic!("{}", d.render(None)));
            assert_eq!(cluster.name, *name);
        }
    }

    #[test]
    fn nodes_with_the_same_links_have_the_same_curves() {
        let curves = |name| builtin(name).unwrap().levels[0].measured.clone().unwrap().curves;
        assert_eq!(curves("dgx-h100"), curves("dgx-h200"));
    }

    #[test]
    fn ranks_that_fill_no_rack_take_as_many_of_each() {
        let used = |name: &str, ranks: u64| {
            let cluster = builtin(name).unwrap().spread(ranks);
            cluster.check().unwrap();
            cluster.levels[0].used.as_ref().map(|used| used.value)
        };
        let racks = |ranks| used("gb200-nvl72", ranks);
        assert_eq!([8, 64, 72, 144, 576].map(racks), [None; 5], "one rack, or full ones");
        assert_eq!([96, 128, 256, 1024].map(racks), [Some(48), Some(64), Some(64), Some(64)]);
        assert_eq!(racks(100), None, "parts of 50 and 25 are no whole nodes of 4");
        assert_eq!(used("dgx-h100", 12), None, "a node is no rack");
        let cluster = builtin("gb200-nvl72").unwrap().spread(128);
        assert_eq!(cluster.devices(), 256 * 64, "what a rack leaves is nobody's");
        let between = |a, b| cluster.level_between(ithaca_ir::Rank(a), ithaca_ir::Rank(b));
        assert_eq!([between(0, 63), between(63, 64), between(64, 127)], [0, 1, 0]);
    }
}
