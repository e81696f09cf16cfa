"""Add-ons of a cluster: names of services, use of resources, and volumes on nodes. They are pods, whose images every
node has."""
