//! Machines that do not reach each other are neighbours in no ring: it goes round them, or does without one of them.

#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

use std::path::Path;

use prima_crds::v1alpha1::model_profile::ModelProfile;
use prima_crds::v1alpha1::node_profile::NodeProfile;
use prima_halda::check::check;
use prima_halda::greedy::first_answer;
use prima_halda::{InputError, Options, Plan, PlanError, PlanningInput, plan};

fn sample(path: &str) -> String {
    let samples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../samples");
    std::fs::read_to_string(samples.join(path)).unwrap()
}

fn model() -> ModelProfile {
    ModelProfile::from_yaml("qwen3-8b.yaml", &sample("models/qwen3-8b.yaml")).unwrap()
}

/// As fast as each other, and with links that are alike. There may be any number.
fn machines(count: usize) -> Vec<NodeProfile> {
    let four = NodeProfile::all_from_yaml("pcs", &sample("machines/four-office-pcs.yaml")).unwrap();
    let name = |index: usize| format!("pc-{index}");
    let pc = |index: usize| {
        let mut pc = four[0].clone();
        pc.metadata.name = Some(name(index));
        let links = &mut pc.status.as_mut().unwrap().links;
        let link = links[0].clone();
        let others = (0..count).filter(|other| *other != index);
        *links = others
            .map(|other| {
                let mut link = link.clone();
                link.to = name(other);
                link
            })
            .collect();
        pc
    };
    (0..count).map(pc).collect()
}

fn pair(one: usize, other: usize) -> [String; 2] {
    [one, other].map(|index| format!("pc-{index}"))
}

/// At least so many machines, in one round.
fn asked(least: usize, apart: &[[String; 2]]) -> Options {
    Options {
        min_nodes: least,
        rounds: Some(1),
        apart: apart.to_vec(),
        ..Options::default()
    }
}

/// At least so many machines of so many.
fn planned(
    least: usize,
    count: usize,
    apart: &[[String; 2]],
) -> Result<(Plan, Vec<NodeProfile>), PlanError> {
    let (model, nodes, options) = (model(), machines(count), asked(least, apart));
    let input = PlanningInput::new(&model, &nodes, &options)?;
    let plan = plan(&input)?;
    assert_eq!(check(&plan, &model, &nodes, &options), []);
    Ok((plan, nodes))
}

fn names(plan: &Plan) -> Vec<&str> {
    let members = plan.members.iter();
    members.map(|member| member.name.as_str()).collect()
}

fn are_neighbours(plan: &Plan, pair: &[String; 2]) -> bool {
    stand_side_by_side(&names(plan), pair)
}

fn stand_side_by_side(names: &[&str], pair: &[String; 2]) -> bool {
    let next = names.iter().cycle().skip(1);
    let mut hops = names.iter().zip(next);
    hops.any(|(one, next)| {
        pair.iter()
            .all(|name| [*one, *next].contains(&name.as_str()))
    })
}

#[test]
fn a_ring_of_four_goes_round_two_that_do_not_meet() {
    let (free, _) = planned(4, 4, &[]).unwrap();
    for (one, other) in [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)] {
        let pair = pair(one, other);
        let (plan, _) = planned(4, 4, std::slice::from_ref(&pair)).unwrap();
        assert_eq!(plan.members.len(), 4);
        assert!(!are_neighbours(&plan, &pair), "{:?}", names(&plan));
        // Their links are alike, so that costs nothing.
        let slower = plan.report.tpot_milliseconds / free.report.tpot_milliseconds;
        assert!(slower < 1.01, "{slower}");
    }
    // Of four, two pairs may stand opposite each other.
    let apart = [pair(0, 1), pair(2, 3)];
    let (plan, _) = planned(4, 4, &apart).unwrap();
    assert!(!apart.iter().any(|pair| are_neighbours(&plan, pair)));
}

#[test]
fn of_three_one_is_left_out_or_the_pair_is_named() {
    let apart = [pair(1, 2)];
    let (plan, _) = planned(2, 3, &apart).unwrap();
    let members = names(&plan);
    assert!(
        members.len() == 2 && members.contains(&"pc-0"),
        "{members:?}"
    );
    let error = planned(3, 3, &apart).err().unwrap();
    let said = "qwen3-8b: in every ring, two machines would be neighbours that do not reach each other (pc-1 and pc-2)";
    assert_eq!(error.to_string(), said);
    // Two of two; and whoever is not there is in nobody's way.
    assert!(planned(2, 2, &[pair(0, 1)]).is_err());
    let (alone, _) = planned(1, 2, &[pair(0, 1)]).unwrap();
    assert_eq!(alone.members.len(), 1);
    assert!(planned(2, 2, &apart).is_ok());
}

#[test]
fn a_pair_that_is_apart_needs_no_link() {
    let mut nodes = machines(4);
    for (one, other) in [(0, 1), (1, 0)] {
        let links = &mut nodes[one].status.as_mut().unwrap().links;
        links.retain(|link| link.to != format!("pc-{other}"));
    }
    let apart = [pair(1, 0)];
    let options = asked(4, &apart);
    let input = PlanningInput::new(&model(), &nodes, &options).unwrap();
    let plan = plan(&input).unwrap();
    assert_eq!(check(&plan, &model(), &nodes, &options), []);
    assert!(plan.members.len() == 4 && !are_neighbours(&plan, &apart[0]));
    let error = PlanningInput::new(&model(), &nodes, &asked(4, &[])).unwrap_err();
    let link = InputError::Link {
        from: "pc-0".to_owned(),
        to: "pc-1".to_owned(),
    };
    assert_eq!(error, link);
}

#[test]
fn not_all_of_very_many_pairs_are_named() {
    let pairs = (0..5).flat_map(|one| (one + 1..5).map(move |other| pair(one, other)));
    let pairs: Vec<[String; 2]> = pairs.collect();
    let said = planned(5, 5, &pairs).err().unwrap().to_string();
    assert!(
        said.ends_with("pc-1 and pc-4, pc-2 and pc-3, and 2 more pairs)"),
        "{said}"
    );
}

/// Their order is not part of the program that is solved.
#[test]
fn many_machines_stand_in_an_order_without_the_pairs() {
    let apart = [pair(0, 1), pair(1, 2), pair(12, 13), pair(13, 0)];
    let (plan, _) = planned(14, 14, &apart).unwrap();
    assert_eq!(plan.members.len(), 14);
    let side_by_side = apart.iter().find(|pair| are_neighbours(&plan, pair));
    assert_eq!(side_by_side, None, "{:?}", names(&plan));
}

/// It is the answer where there is no time to find another one.
#[test]
fn the_first_answer_goes_round_them_too() {
    for (least, count, pair) in [
        (4, 4, pair(0, 1)),
        (4, 4, pair(1, 2)),
        (4, 4, pair(3, 0)),
        // One of the two is left out.
        (2, 3, pair(0, 1)),
        (2, 3, pair(0, 2)),
        (2, 3, pair(1, 2)),
    ] {
        let options = asked(least, std::slice::from_ref(&pair));
        let input = PlanningInput::new(&model(), &machines(count), &options).unwrap();
        let found = first_answer(&input).unwrap();
        let ring = found.assignment.ring.iter();
        let names: Vec<&str> = ring.map(|&one| input.devices[one].name.as_str()).collect();
        assert!(names.len() >= least, "{names:?}");
        assert!(!stand_side_by_side(&names, &pair), "{pair:?}: {names:?}");
    }
    let options = asked(3, &[pair(0, 1)]);
    let input = PlanningInput::new(&model(), &machines(3), &options).unwrap();
    assert!(first_answer(&input).is_none());
}

#[test]
fn the_check_finds_neighbours_that_do_not_meet() {
    let (plan, nodes) = planned(4, 4, &[]).unwrap();
    let members = names(&plan);
    let [first, last] = [members[0], members[3]].map(str::to_owned);
    let options = Options {
        apart: vec![[first.clone(), last.clone()]],
        ..Options::default()
    };
    let found = check(&plan, &model(), &nodes, &options);
    let found: Vec<String> = found.iter().map(ToString::to_string).collect();
    let said = format!("{last} and {first} are neighbours, but do not reach each other");
    assert_eq!(found, [said]);
}
