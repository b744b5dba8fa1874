package raftfsm

import (
	"fmt"
	"slices"
)

// moveSeat makes a claimant the one that should hold the seat. The holder stays as
// it is: the leader hands over.
func (t *tx) moveSeat(c MoveSeat) *Rejection {
	seat, ok := t.Seats[c.Seat]
	switch {
	case !ok:
		r := reject("no-seat", "", fmt.Sprintf("there is no mesh seat %q", clip(c.Seat)), "meshd seats lists them")
		r.Candidates = nearest(c.Seat, sorted(t.Seats))
		return r
	case seat.Scope != ScopeMesh:
		return reject("node-seat", "", fmt.Sprintf("seat %s is a node seat, which each node answers for itself, so it does not move", seat.Name), fmt.Sprintf("ask the node that is meant: NODE/%s.VERB", seat.Name))
	}
	n, ok := t.NodeNamed(c.Node)
	if !ok {
		r := reject("no-node", "", fmt.Sprintf("there is no node %q", clip(c.Node)), "meshd node ls lists them")
		r.Candidates = nearest(c.Node, t.nodeNames())
		return r
	}
	to, r := t.claimantOn(seat, n, c.Assignment)
	if r != nil {
		return r
	}
	if !has(t.Sessions, n.ID) {
		return t.offerNodes(seat, "no-lease", fmt.Sprintf("seat %s cannot move to %s now: node %s has no lease, and could not answer it", seat.Name, n.Name, n.Name),
			"start meshd there, and give the command again", func(a Assignment) bool { return has(t.Sessions, a.Node) })
	}
	if seat.Want == to {
		return nil
	}
	seat.Want = to
	put(t, t.Seats, seat.Name, seat)
	t.Mesh.Changed = t.Index
	t.event("seat %s is to be held by %s on %s", seat.Name, to, n.Name)
	return t.resolve()
}

// claimantOn is the claimant of the seat on the node: the only one there, or the one
// that is named.
func (t *tx) claimantOn(seat Seat, n Node, named string) (string, *Rejection) {
	var there []string
	for _, claimant := range t.Claimants(seat.Name) {
		if t.Assignments[claimant].Node == n.ID {
			there = append(there, claimant)
		}
	}
	switch {
	case named != "" && slices.Contains(there, named):
		return named, nil
	case named == "" && len(there) == 1:
		return there[0], nil
	case len(there) == 0:
		return "", t.offerNodes(seat, "not-a-claimant", fmt.Sprintf("seat %s cannot move to %s: nothing there claims it", seat.Name, n.Name),
			fmt.Sprintf("add claims: [%s] to a module and assign that to %s", seat.Name, n.Name), func(Assignment) bool { return true })
	}
	text := fmt.Sprintf("seat %s cannot move to %s: %s all claim it there, and one answers", seat.Name, n.Name, few(there))
	code := "ambiguous"
	if named != "" {
		text = fmt.Sprintf("seat %s cannot move to %q on %s: no claimant there has that name", seat.Name, clip(named), n.Name)
		code = "not-a-claimant"
	}
	r := reject(code, "", text, fmt.Sprintf("write meshd seat move %s %s/%s", seat.Name, n.Name, there[0]))
	for _, claimant := range there {
		r.Candidates = append(r.Candidates, n.Name+"/"+claimant)
	}
	return "", r
}

// offerNodes is a refusal with the nodes of those claimants that could have it.
func (t *tx) offerNodes(seat Seat, code, text, remedy string, could func(Assignment) bool) *Rejection {
	var nodes []string
	for _, claimant := range t.Claimants(seat.Name) {
		if a := t.Assignments[claimant]; could(a) {
			nodes = append(nodes, t.NodeName(a.Node))
		}
	}
	slices.Sort(nodes)
	nodes = slices.Compact(nodes)
	if len(nodes) > 0 {
		remedy += fmt.Sprintf("; or write meshd seat move %s %s", seat.Name, nodes[0])
	}
	r := reject(code, "", text, remedy)
	r.Candidates = nodes
	return r
}
