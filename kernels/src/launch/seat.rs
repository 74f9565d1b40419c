//! Which rank a process is and where rank 0 listens, by the environment that launchers set.

use super::digest::digest;
use super::error::LaunchError;

/// How many ports after `MASTER_PORT` rank 0 tries where none is named.
const PORTS: u16 = 8;

/// What launchers call the rank and the number of ranks, and what they call the job; the first of which anything is set
/// is the one that started this process.
const LAUNCHERS: [(&str, &str, &[&str]); 4] = [
    ("RANK", "WORLD_SIZE", &["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"]),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", &["PMIX_NAMESPACE"]),
    ("PMI_RANK", "PMI_SIZE", &[]),
    ("SLURM_PROCID", "SLURM_NTASKS", &["SLURM_JOB_ID", "SLURM_STEP_ID"]),
];

/// What launchers call the number of a process among those of its machine.
const LOCAL_RANKS: [&str; 4] =
    ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];

/// The place of a process among those that a launcher started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Its rank.
    pub rank: u64,
    /// How many processes there are.
    pub world: u64,
    /// The host of rank 0: `MASTER_ADDR`.
    pub host: String,
    /// Where rank 0 listens: on the first of these ports that is free. That of `ITHACA_PORT`, or the eight after
    /// `MASTER_PORT`, which itself is the launcher's own.
    pub ports: Vec<u16>,
    /// The number by which processes of one job know each other.
    pub job: u64,
    /// Its number among the processes of its machine, where the launcher says it.
    pub local_rank: Option<u64>,
}

impl Seat {
    /// Reads the environment that `variable` answers: `RANK` and `WORLD_SIZE`, or what `mpirun` and `srun` set in their
    /// place, `MASTER_ADDR`, and `MASTER_PORT` or `ITHACA_PORT`.
    ///
    /// # Errors
    /// [`LaunchError::Environment`] with every variable that is missing or malformed.
    pub fn of(variable: impl Fn(&str) -> Option<String>) -> Result<Seat, LaunchError> {
        let mut wrong = Vec::new();
        let is_set = |name: &str| variable(name).is_some();
        let launcher = LAUNCHERS.iter().find(|(rank, size, _)| is_set(rank) || is_set(size));
        let (rank_name, size_name, job_names) = *launcher.unwrap_or(&LAUNCHERS[0]);
        let mut number = |name: &str, min: u64, max: u64| match variable(name) {
            None => {
                wrong.push(format!("{name} is not set"));
                None
            }
            Some(text) => match text.trim().parse::<u64>() {
                Ok(n) if (min..=max).contains(&n) => Some(n),
                Ok(n) => {
                    wrong.push(format!("{name} is {n}, which does not lie in {min} to {max}"));
                    None
                }
                Err(_) => {
                    wrong.push(format!("{name} is `{text}`, which is no number"));
                    None
                }
            },
        };
        let rank = number(rank_name, 0, u64::MAX);
        let world = number(size_name, 1, u64::MAX);
        let port = match is_set("ITHACA_PORT") {
            true => number("ITHACA_PORT", 1, u64::from(u16::MAX)),
            false => number("MASTER_PORT", 1, u64::from(u16::MAX) - 1),
        };
        let host = variable("MASTER_ADDR").filter(|host| !host.trim().is_empty());
        if host.is_none() {
            wrong.push("MASTER_ADDR is not set".to_owned());
        }
        if let (Some(rank), Some(world)) = (rank, world)
            && rank >= world
        {
            wrong.push(format!("{rank_name} is {rank}, and {size_name} {world}: ranks are counted from 0"));
        }
        let (Some(rank), Some(world), Some(port), Some(host), true) =
            (rank, world, port, host, wrong.is_empty())
        else {
            return Err(LaunchError::Environment(wrong));
        };
        // Both bounds were checked above.
        let port = u16::try_from(port).unwrap_or(u16::MAX);
        let ports = match is_set("ITHACA_PORT") {
            true => vec![port],
            false => (1..=PORTS).filter_map(|n| port.checked_add(n)).collect(),
        };
        let host = host.trim().to_owned();
        let mut names: Vec<String> = job_names.iter().filter_map(|name| variable(name)).collect();
        names.extend([env!("CARGO_PKG_VERSION").to_owned(), port.to_string()]);
        let job = digest(names.iter().map(String::as_str));
        let local_rank = LOCAL_RANKS.iter().find_map(|name| variable(name)?.trim().parse().ok());
        Ok(Seat { rank, world, host, ports, job, local_rank })
    }

    /// Where rank 0 listens, for a person.
    pub(super) fn address(&self) -> String {
        match self.ports.as_slice() {
            [first, .., last] => format!("{}:{first} to {last}", self.host),
            [port] => format!("{}:{port}", self.host),
            [] => self.host.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<Seat, Vec<String>> {
        let seat = Seat::of(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        });
        seat.map_err(|error| match error {
            LaunchError::Environment(wrong) => wrong,
            other => vec![other.to_string()],
        })
    }

    #[test]
    fn each_launcher_says_which_process_it_is() {
        let address = [("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];
        for (rank, size) in [
            ("RANK", "WORLD_SIZE"),
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            ("PMI_RANK", "PMI_SIZE"),
            ("SLURM_PROCID", "SLURM_NTASKS"),
        ] {
            let seat = of(&[&address[..], &[(rank, "3"), (size, "4")]].concat()).unwrap();
            assert_eq!((seat.rank, seat.world, seat.host.as_str()), (3, 4, "node0"));
            assert_eq!(seat.ports, (29501..=29508).collect::<Vec<u16>>());
        }
        // torchrun in an allocation of Slurm.
        let both =
            [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), ("RANK", "1"), ("WORLD_SIZE", "2"), address[0]];
        let seat = of(&[&both[..], &[("ITHACA_PORT", "7000")]].concat()).unwrap();
        assert_eq!((seat.rank, seat.world, seat.ports), (1, 2, vec![7000]));
    }

    #[test]
    fn everything_that_is_wrong_is_named() {
        let wrong = of(&[]).unwrap_err();
        let missing = ["RANK", "WORLD_SIZE", "MASTER_PORT", "MASTER_ADDR"];
        assert_eq!(wrong, missing.map(|name| format!("{name} is not set")));
        let wrong =
            of(&[("RANK", "two"), ("WORLD_SIZE", "0"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "65535")])
                .unwrap_err();
        assert_eq!(wrong.len(), 3, "{wrong:?}");
        let wrong = of(&[("RANK", "4"), ("WORLD_SIZE", "4"), ("MASTER_ADDR", "a"), ("MASTER_PORT", "1")])
            .unwrap_err();
        assert_eq!(wrong, ["RANK is 4, and WORLD_SIZE 4: ranks are counted from 0"]);
    }

    #[test]
    fn jobs_are_told_apart() {
        let job = |id: &str, port: &str| {
            let variables = [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "a"), ("MASTER_PORT", port)];
            of(&[&variables[..], &[("TORCHELASTIC_RUN_ID", id)]].concat()).unwrap().job
        };
        assert_eq!(job("x", "1"), job("x", "1"));
        assert_ne!(job("x", "1"), job("y", "1"));
        assert_ne!(job("x", "1"), job("x", "2"));
    }
}
