package peer

import (
	"slices"

	"meshd/raftfsm"
)

// verb is what a job does for one binding or withdrawal.
type verb string

// The verbs of a provider's node and of a consumer's.
const (
	verbPreflight verb = "preflight"
	verbStage     verb = "stage"
	verbMint      verb = "mint"
	verbWatch     verb = "watch"
	verbWithdraw  verb = "withdraw"
	verbCheck     verb = "check"
	verbDeliver   verb = "deliver"
)

// job is one thing that this node has to do, decided from the state alone.
type job struct {
	Verb       verb
	Binding    string             // or the binding that a withdrawal was
	Withdrawal string             // with verbWithdraw
	Credential raftfsm.Credential // with mint, watch and check; with stage only its generation is set
	Old        []raftfsm.Credential
	ResourceID string
	Resource   raftfsm.Resource
	Consumer   string // node id of the consumer, with verbStage
}

// decideService is what the node of a provider has to do at its service, in
// order: withdrawals first, because a login that should be dead is worse than
// one that is late.
func decideService(s *raftfsm.State, spec raftfsm.ProviderSpec) []job {
	jobs := []job{{Verb: verbPreflight}}
	ready := s.Providers[raftfsm.ProviderID(spec.Assignment, spec.Kind)].Ready
	for _, id := range sortedKeys(s.Withdrawals) {
		w := s.Withdrawals[id]
		if w.Provider == spec.Assignment && w.Kind == spec.Kind {
			jobs = append(jobs, job{Verb: verbWithdraw, Binding: w.Binding, Withdrawal: id, Old: w.Credentials, ResourceID: w.Resource, Resource: s.Resources[w.Resource]})
		}
	}
	for _, id := range s.ConsumersOf(spec.Assignment) {
		b := s.Bindings[id]
		if b.Kind != spec.Kind {
			continue
		}
		j := job{Binding: id, ResourceID: b.Resource, Resource: s.Resources[b.Resource], Consumer: s.Assignments[b.Consumer].Node}
		if len(b.Credentials) == 0 {
			if ready {
				j.Verb, j.Credential.Generation = verbStage, j.Resource.Last+1
				jobs = append(jobs, j)
			}
			continue
		}
		for _, c := range b.Credentials {
			j.Credential = c
			switch {
			case !c.Minted:
				j.Verb = verbMint
			case c.Delivered && !c.Seen && b.Proof == raftfsm.ProofLogin:
				j.Verb = verbWatch
			default:
				continue
			}
			jobs = append(jobs, j)
		}
	}
	return stageOnce(jobs)
}

// stageOnce keeps one staging per resource: each takes the resource's next
// generation, so the second of two would be refused.
func stageOnce(jobs []job) []job {
	staging := map[string]bool{}
	return slices.DeleteFunc(jobs, func(j job) bool {
		if j.Verb != verbStage {
			return false
		}
		second := staging[j.ResourceID]
		staging[j.ResourceID] = true
		return second
	})
}

// need is one requirement of an assignment, as its node sees it.
type need struct {
	Requirement string
	Binding     string
	Kind        string
	Provider    string
	ResourceID  string
	Resource    raftfsm.Resource
	Credential  *raftfsm.Credential // the one to deliver; nil while none is minted
	Address     raftfsm.Address     // where the provider's node says that the service is now
}

// ready reports whether every requirement has something to deliver.
func ready(needs []need) bool {
	return !slices.ContainsFunc(needs, func(n need) bool { return n.Credential == nil })
}

// decideNeeds is what the assignment's bindings give it to deliver: of each the
// newest credential that exists at its service.
func decideNeeds(s *raftfsm.State, run raftfsm.RunSpec) []need {
	var needs []need
	for _, req := range sortedKeys(run.Module.Requires) {
		id := raftfsm.BindingID(run.Assignment, req)
		b := s.Bindings[id]
		n := need{Requirement: req, Binding: id, Kind: b.Kind, Provider: b.Provider, ResourceID: b.Resource, Resource: s.Resources[b.Resource]}
		if c := newestMinted(b); c != nil {
			n.Credential, n.Address = c, c.Address
		}
		if p, ok := s.Providers[raftfsm.ProviderID(b.Provider, b.Kind)]; ok && p.Address.Host != "" {
			n.Address = p.Address
		}
		needs = append(needs, n)
	}
	return needs
}

// newestMinted is the credential to deliver, or nil.
func newestMinted(b raftfsm.Binding) *raftfsm.Credential {
	for _, c := range slices.Backward(b.Credentials) {
		if c.Minted {
			return &c
		}
	}
	return nil
}
